"""Writing a HuggingFace folder: any order, any process, any rectangle; full and forbidden disks."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron_bridge.huggingface.folder import HuggingFaceFolder
from megatron_bridge.huggingface.safetensors_file import DTYPES
from megatron_bridge.huggingface.transpose import in_order
from megatron_bridge.huggingface.write import SafetensorsFolder
from megatron_bridge.source import TensorInfo, whole
from tests.bridge import tiny
from tests.ranks import run_ranks


def _infos(tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(t.dtype, tuple(t.shape)) for name, t in tensors.items()}


def _write_all(folder: SafetensorsFolder, tensors: dict[str, torch.Tensor]) -> None:
    for name in reversed(tensors):
        folder.write(name, whole(tuple(tensors[name].shape)), tensors[name])


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_safetensors_reads_every_dtype(tmp_path):
    generator = torch.Generator().manual_seed(5)
    tensors = {"empty": torch.zeros(2, 0), "number": torch.tensor(3, dtype=torch.int16)}
    for rows, (name, dtype) in enumerate(DTYPES.items(), 1):
        values = torch.randint(0, 2, (rows, 3 * dtype.itemsize), generator=generator)
        tensors[name] = values.to(torch.uint8).view(dtype)
    folder = SafetensorsFolder.create(tmp_path / "out", _infos(tensors))
    _write_all(folder, tensors)
    folder.finish({"model_type": "x"})
    assert _names(tmp_path / "out") == ["config.json", "model.safetensors"]
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert _bytes(read[name]) == _bytes(tensor)


@given(st.data(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_any_rectangle_goes_to_its_place(tmp_path_factory, data, transposed):
    size = st.integers(1, 5)
    shape = tuple(data.draw(st.lists(size, min_size=1, max_size=4)))
    expected = torch.zeros(shape, dtype=torch.int32)
    infos = {"a": TensorInfo(torch.int32, (3,)), "x": TensorInfo(torch.int32, shape)}
    folder = SafetensorsFolder.create(tmp_path_factory.mktemp("out"), infos)
    for number in range(1, 4):
        ranges = []
        for extent in shape:
            first = data.draw(st.integers(0, extent))
            ranges.append((first, data.draw(st.integers(first, extent))))
        rectangle = torch.Size(last - first for first, last in ranges)
        piece = torch.arange(rectangle.numel(), dtype=torch.int32).view(rectangle) + 1000 * number
        if transposed:
            piece = piece.mT.contiguous().mT if piece.dim() > 1 else piece
        expected[tuple(slice(*interval) for interval in ranges)] = piece
        folder.write("x", tuple(ranges), piece)
    folder.finish({})
    read = load_file(folder.path / "model.safetensors")
    assert torch.equal(read["x"], expected) and not read["a"].any()


def test_large_pieces_out_of_order_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_bridge.huggingface.write._PIECE_BYTES", 100)
    matrix = torch.arange(70 * 30, dtype=torch.int64).view(30, 70).t()
    folder = SafetensorsFolder.create(tmp_path, _infos({"x": matrix}))
    folder.write("x", whole((70, 30)), matrix)
    folder.finish({})
    assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], matrix)


def test_any_view_is_put_in_order():
    cube = torch.arange(3 * 70 * 90, dtype=torch.int16).view(3, 70, 90)
    views = [cube, cube.mT, cube[:, 3:66, 5:80].mT, cube.transpose(0, 1), cube.transpose(0, 2)]
    for view in [*views, cube[0].t()[:, :1], cube[0, :, 0], cube[0, 0, 0], cube[:, :0].mT]:
        ordered = in_order(view)
        assert ordered.is_contiguous() and torch.equal(ordered, view)
    assert in_order(cube) is cube


def _write_share(path: Path, source: Path) -> None:
    """Each rank writes every other row block, in an order of its own."""
    rank, tensors = dist.get_rank(), HuggingFaceFolder(source)
    infos = tensors.tensors()
    if rank == 0:
        SafetensorsFolder.create(path, infos, shard_bytes=60_000)
    dist.barrier()
    folder = SafetensorsFolder(path)
    for name, info in sorted(infos.items(), reverse=bool(rank)):
        for row in range(rank * 7, info.shape[0], 14):
            rows = ((row, min(row + 7, info.shape[0])), *whole(info.shape[1:]))
            folder.write(name, rows, tensors.read(name, rows))
    folder.flush()
    dist.barrier()
    if rank == 0:
        folder.finish(tensors.config(), source)


def test_transformers_loads_what_two_processes_wrote(tmp_path):
    model = tiny.model("qwen3")
    source = tiny.save(model, tmp_path / "source")
    for name in ("tokenizer.json", "merges.txt", "LICENSE", "modeling_x.py", "tokenizer_x.py"):
        (source / name).write_text(name)
    (source / "chat_templates").mkdir()
    (source / "chat_templates" / "tool.jinja").write_text("x")
    run_ranks(_write_share, 2, tmp_path / "out", source)
    out = _names(tmp_path / "out")
    shards = [name for name in out if name.endswith(".safetensors")]
    assert len(shards) > 3 and all(
        len(s) == len("model-00001-of-00005.safetensors") for s in shards
    )
    others = ["LICENSE", "chat_templates", "config.json", "generation_config.json", "merges.txt"]
    assert [n for n in out if n not in shards] == [
        *others,
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = HuggingFaceFolder(source).tensors()
    assert index["metadata"]["total_size"] == sum(info.bytes for info in tensors.values())
    assert HuggingFaceFolder(tmp_path / "out").tensors() == tensors
    for name in shards:
        assert (tmp_path / "out" / name).stat().st_size < 60_000 + 4096
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, parameter in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], parameter), name


def test_a_creation_cut_short_is_noticed(tmp_path):
    infos = {f"t{i}": TensorInfo(torch.int8, (10,)) for i in range(3)}
    SafetensorsFolder.create(tmp_path, infos, shard_bytes=10)
    assert SafetensorsFolder(tmp_path).tensors() == infos
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks model-00003-of-00003.safetensors; start anew"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "model-00001-of-00003.safetensors").write_bytes(b"12")
    with pytest.raises(ValueError):
        SafetensorsFolder(tmp_path)
    SafetensorsFolder.create(tmp_path, infos)
    assert _names(tmp_path) == ["model.safetensors"]
    with pytest.raises(ValueError, match=r"lacks model.safetensors; start anew"):
        SafetensorsFolder(tmp_path / "none")


def test_too_little_space_is_noticed_before_anything_is_written(tmp_path):
    huge = {"x": TensorInfo(torch.float32, (1 << 50,))}
    with pytest.raises(ValueError, match=r"needs 4503599627370496 bytes .* and the disk has \d+ f"):
        SafetensorsFolder.create(tmp_path, huge)
    assert not _names(tmp_path)
    with pytest.raises(ValueError, match=r"no such dtypes: 'x' \(torch.complex64\)"):
        SafetensorsFolder.create(tmp_path / "a", {"x": TensorInfo(torch.complex64, (1,))})
    with pytest.raises(ValueError, match="a shard of 0 bytes holds nothing"):
        SafetensorsFolder.create(tmp_path / "a", {}, shard_bytes=0)


def test_a_full_disk_is_one_clear_error(tmp_path):
    folder = SafetensorsFolder.create(tmp_path, {"x": TensorInfo(torch.int32, (8,))})
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("/dev/full")
    with pytest.raises(ValueError) as error:
        folder.write("x", ((2, 8),), torch.zeros(6, dtype=torch.int32))
    where = tmp_path / "model.safetensors"
    assert str(error.value) == (
        f"the disk is full, {where} cannot be written; 24 bytes more are needed there; make room"
    )


def test_no_permission_is_one_clear_error(tmp_path, monkeypatch):
    tmp_path.chmod(0o555)
    monkeypatch.chdir(tmp_path)
    user = os.geteuid()
    os.seteuid(65534 if user == 0 else user)
    try:
        with pytest.raises(ValueError, match="^no permission to write out$"):
            SafetensorsFolder.create("out", {"x": TensorInfo(torch.int32, (8,))})
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o755)
