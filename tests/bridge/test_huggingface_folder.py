"""Reading HuggingFace folders: any rectangle, no memory, and every way to be broken or hostile."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_bridge.huggingface.folder import HuggingFaceFolder
from megatron_bridge.huggingface.safetensors_file import DTYPES
from megatron_bridge.source import TensorInfo, whole
from tests.ranks import run_ranks

_INDEX = "model.safetensors.index.json"
_ONE = "model.safetensors"


def _tensors() -> dict[str, torch.Tensor]:
    """One tensor of each dtype, all shapes distinct; an empty one and a scalar too."""
    generator = torch.Generator().manual_seed(5)
    made = {}
    for rank, (name, dtype) in enumerate(DTYPES.items()):
        shape = (3 + rank, 5, 2)[: 1 + rank % 3]
        values = torch.randint(0, 2, (*shape, dtype.itemsize), generator=generator)
        made[name.lower()] = values.to(torch.uint8).view(dtype).view(shape)
    return {**made, "empty": torch.zeros(4, 0, 3), "scalar": torch.tensor(2.5)}


def _config(folder: Path) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two shards and their index."""
    first = {"a": torch.arange(12.0).view(4, 3), "b": torch.ones(5, dtype=torch.int64)}
    second = {"c": torch.zeros(2, 2, dtype=torch.bfloat16)}
    save_file(first, tmp_path / "x-1.safetensors")
    save_file(second, tmp_path / "x-2.safetensors")
    _index(tmp_path, {"a": "x-1.safetensors", "b": "x-1.safetensors", "c": "x-2.safetensors"})
    return _config(tmp_path)


def _index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _raw(path: Path, header: Any, data: bytes = b"") -> None:
    """A safetensors file of this header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _entry(begin: int, end: int, *, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _error(folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        HuggingFaceFolder(folder)
    return str(error.value)


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (ours, theirs)]
    return torch.equal(*as_bytes)


@pytest.mark.parametrize("file", [_ONE, "pytorch_model.bin"])
def test_tensors_are_what_was_written(tmp_path, file):
    tensors = _tensors()
    save: Callable = save_file if file == _ONE else torch.save
    save(tensors, tmp_path / file)
    for path in (tmp_path, tmp_path / file):
        source = HuggingFaceFolder(_config(tmp_path) and path)
        assert source.config() == {"model_type": "llama"}
        assert source.tensors().keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert source.tensors()[name] == TensorInfo(tensor.dtype, tuple(tensor.shape))
            assert _same(source.read(name, whole(tuple(tensor.shape))), tensor), name


@pytest.fixture(scope="module")
def shaped(tmp_path_factory) -> tuple[HuggingFaceFolder, dict[str, torch.Tensor]]:
    folder = _config(tmp_path_factory.mktemp("shaped"))
    tensors = {
        "cube": torch.arange(7 * 5 * 3, dtype=torch.int16).view(7, 5, 3),
        "matrix": torch.randn(11, 6, dtype=torch.float64).bfloat16(),
    }
    save_file(tensors, folder / _ONE)
    # Behind an odd number of bytes no float can be mapped: other writers leave it so.
    header = {"odd": _entry(0, 3), "float": _entry(3, 63, dtype="F32", shape=[5, 3])}
    header["number"] = _entry(63, 67, dtype="F32", shape=[])
    data = torch.arange(15.0).view(5, 3)
    body = b"abc" + data.numpy().tobytes() + torch.tensor(7.0).numpy().tobytes()
    odd = _config(tmp_path_factory.mktemp("odd"))
    _raw(odd / _ONE, header, body)
    unaligned = HuggingFaceFolder(odd)
    assert unaligned.read("number", ()).item() == 7.0
    assert torch.equal(unaligned.read("float", ((1, 4), (1, 3))), data[1:4, 1:3])
    assert unaligned.read("float", ((2, 2), (0, 3))).shape == (0, 3)
    return HuggingFaceFolder(folder), tensors


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_rectangle(shaped, data):
    source, tensors = shaped
    name = data.draw(st.sampled_from(sorted(tensors)))
    ranges = []
    for size in tensors[name].shape:
        first = data.draw(st.integers(0, size))
        ranges.append((first, data.draw(st.integers(first, size))))
    expected = tensors[name][tuple(slice(*interval) for interval in ranges)]
    assert _same(source.read(name, tuple(ranges)), expected)


def test_shards_come_in_the_order_of_the_data(folder):
    source = HuggingFaceFolder(folder)
    assert list(source.tensors()) == ["b", "a", "c"]  # safetensors puts wide dtypes first
    assert [file.name for file in source.files] == ["x-1.safetensors", "x-2.safetensors"]


def test_an_index_of_pickle_files_is_read(tmp_path):
    torch.save({"a": torch.ones(2, 3).t()}, tmp_path / "p-1.bin")
    torch.save({"b": torch.ones(4)}, tmp_path / "p-2.bin")
    index = {"weight_map": {"a": "p-1.bin", "b": "p-2.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    source = HuggingFaceFolder(_config(tmp_path))
    assert source.read("a", ((1, 3), (0, 2))).shape == (2, 2)


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def _memory_of_reading(folder: Path) -> tuple[int, int]:
    """Anonymous memory that opening and reading took, and how much was read."""
    HuggingFaceFolder(folder)  # what the first one takes besides is code, not data
    before, read = _anonymous_bytes(), 0
    source = HuggingFaceFolder(folder)
    for name, info in source.tensors().items():
        part = source.read(name, whole(info.shape))
        read += int(part.view(torch.uint8).count_nonzero()) and info.bytes
    return _anonymous_bytes() - before, read


@pytest.mark.parametrize("file", [_ONE, "pytorch_model.bin"])
def test_reading_takes_no_memory(tmp_path, file):
    tensors = {f"t{i}": torch.full((1 << 20,), i + 1, dtype=torch.int32) for i in range(16)}
    save: Callable = save_file if file == _ONE else torch.save
    save(tensors, tmp_path / file)
    used, read = run_ranks(_memory_of_reading, 1, _config(tmp_path))[0]
    assert read == 16 * 4 << 20
    assert used < 12 << 20


def test_a_file_that_changes_is_named(folder):
    source = HuggingFaceFolder(folder)
    source.check_unchanged()
    os.utime(folder / "x-2.safetensors", ns=(1, 1))
    with pytest.raises(ValueError, match=r"changed while being read: \S+x-2.safetensors; wait"):
        source.check_unchanged()
    (folder / "x-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"x-1.safetensors, \S+x-2.safetensors"):
        source.check_unchanged()


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "is not JSON"),
        (b"\xff{}", b"", "is not JSON"),
        (b"[" * 100_000, b"", "is not JSON"),
        (b"[]", b"", "no JSON object"),
        ({"a": 3}, b"", "'a' is not described by dtype, shape and data_offsets"),
        ({"a": {"dtype": "U8", "shape": [1]}}, b"1", "'a' is not described by"),
        ({"a": _entry(0, 1, dtype=[])}, b"1", "'a' is not described by"),
        ({"a": _entry(0, 1, shape=3)}, b"1", "'a' is not described by"),
        ({"a": _entry(0, 1, dtype="F4", shape=[2])}, b"1", "'F4' is not one of F64, F32"),
        ({"a": _entry(0, 1, shape=[-1])}, b"1", "[-1] is not a list of sizes"),
        ({"a": _entry(0, 1, shape=[True])}, b"1", "is not a list of sizes"),
        ({"a": _entry(0, 1, shape=[1] * 65)}, b"1", "is not a list of sizes"),
        ({"a": _entry(0, 0, shape=[0, 1 << 63])}, b"", "is larger than any tensor"),
        ({"a": _entry(0, 2, shape=[1])}, b"12", "[0, 2] are not the 1 bytes of U8 [1]"),
        ({"a": _entry(0, 2), "b": _entry(1, 3)}, b"123", "'b' at byte 1 of the data overlaps 'a'"),
        ({"a": _entry(0, 1), "b": _entry(2, 3)}, b"123", "'b' at byte 2 of the data leaves 1"),
        ({"a": _entry(-1, 1, shape=[2])}, b"1", "overlaps the header"),
        ({"a": _entry(0, 1)}, b"12", "1 bytes at its end belong to no tensor"),
        ({"a": _entry(0, 9)}, b"12", "truncated, its tensors need 9 bytes and it has 2"),
        ({"a": _entry(0, 1 << 70)}, b"12", "is larger than any tensor"),
    ],
)
def test_a_broken_header_is_one_clear_error(tmp_path, header, data, message):
    _raw(_config(tmp_path) / _ONE, header, data)
    text = _error(tmp_path)
    assert message in text and str(tmp_path / _ONE) in text
    assert len(text) < 1000


@pytest.mark.parametrize("size", [0, 7, 8, 20, 60, 300])
def test_a_truncated_file_is_noticed_at_opening(folder, size):
    for file in ("x-1.safetensors", "x-2.safetensors"):
        os.truncate(folder / file, min(size, (folder / file).stat().st_size - 1))
    text = _error(folder)
    assert "x-1.safetensors" in text and "x-2.safetensors" in text  # all of a kind at once


def test_a_header_may_not_be_endless(tmp_path):
    with open(_config(tmp_path) / _ONE, "wb") as file:
        file.write((200 << 20).to_bytes(8, "little"))
        file.truncate(300 << 20)
    assert "the format allows 100000000" in _error(tmp_path)


def test_a_header_may_not_name_a_tensor_twice(tmp_path):
    entry = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = f"{{{entry},{entry}}}".encode()
    (_config(tmp_path) / _ONE).write_bytes(len(text).to_bytes(8, "little") + text + b"1")
    assert "names 'a' twice" in _error(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "sub/x-1.safetensors", "..", "", "a\0"])
def test_an_index_cannot_leave_its_folder(folder, name):
    _index(folder, {"a": name, "b": "gone.safetensors"})
    text = _error(folder)
    assert f"'{name}' is not a file of" in text and "'gone.safetensors' is missing" in text


def test_an_index_that_lies_is_refused(folder):
    shards = ("x-1.safetensors", "x-2.safetensors")
    _index(folder, {"a": shards[1], "b": shards[0], "d": shards[1]})
    text = _error(folder)
    assert "it places 'a' in x-2.safetensors, which lacks it" in text
    assert "it places 'd' in x-2.safetensors, which lacks it" in text
    assert "x-2.safetensors holds 'c', which the index does not name" in text


def test_a_tensor_in_two_files_is_refused(folder):
    save_file({"a": torch.ones(1), "c": torch.ones(1)}, folder / "x-2.safetensors")
    assert "holds tensors twice: 'a' in x-1.safetensors and x-2.safetensors" in _error(folder)


def test_two_models_in_one_folder_are_refused(folder):
    save_file({"a": torch.ones(1)}, folder / _ONE)
    assert "holds two models, model.safetensors and the files of" in _error(folder)


@pytest.mark.parametrize(
    "text", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[1", "\ud800", "[" * 99999]
)
def test_an_index_that_is_none_is_refused(folder, text):
    (folder / _INDEX).write_text(text, encoding="utf-8", errors="surrogatepass")
    assert str(folder / _INDEX) in _error(folder)


def test_a_folder_without_a_model_says_what_it_lacks(tmp_path):
    assert "there is no folder" in _error(tmp_path / "none")
    assert "it has no config.json" in _error(tmp_path)
    (_config(tmp_path) / "model.gguf").touch()
    assert "has no weights: none of model.safetensors, " in _error(tmp_path)
    assert "; it has model.gguf" in _error(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "holds no JSON object" in _error(tmp_path)


def test_a_pipe_is_no_weight_file(tmp_path):
    os.mkfifo(_config(tmp_path) / _ONE)
    assert "it is not a regular file" in _error(tmp_path)


@contextmanager
def _as_another_user() -> Iterator[None]:
    """Root may read everything; anybody else keeps who he is."""
    user = os.geteuid()
    os.seteuid(65534 if user == 0 else user)
    try:
        yield
    finally:
        os.seteuid(user)


def test_no_permission_is_told_for_all_files(folder, monkeypatch):
    for file in ("x-1.safetensors", "x-2.safetensors"):
        (folder / file).chmod(0)
    folder.chmod(0o755)
    monkeypatch.chdir(folder)  # its parents may be closed to others
    with _as_another_user():
        text = _error(Path())
    assert "no permission to read x-1" in text and "no permission to read x-2" in text


class _Hostile:
    def __reduce__(self):
        return os.mkdir, ("broken-into",)


def test_a_pickle_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(_config(tmp_path))
    torch.save({"a": torch.ones(1), "b": _Hostile()}, tmp_path / "pytorch_model.bin")
    text = _error(tmp_path)
    assert "is refused: it holds" in text and "mkdir" in text and "weights_only" not in text
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"b": _Hostile()}))
    assert "cannot be mapped" in _error(tmp_path) or "is refused" in _error(tmp_path)
    assert not (tmp_path / "broken-into").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "holds a list, not tensors by name"),
        ({"a": torch.ones(1), "step": 3, 7: torch.ones(1)}, "'step' is a int, not a tensor; 7 is"),
        ({"a": torch.ones(2, 2).to_sparse()}, "'a' is a torch.sparse_coo tensor"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "has dtype torch.complex64"),
        ({"a": torch.ones(1).expand(1 << 40)}, "'a' repeats its data to shape (1099511627776,)"),
    ],
)
def test_a_pickle_holds_tensors_by_name(tmp_path, content, message):
    torch.save(content, _config(tmp_path) / "pytorch_model.bin")
    assert message in _error(tmp_path)


def test_a_damaged_or_old_pickle_is_refused(tmp_path):
    path = _config(tmp_path) / "pytorch_model.bin"
    torch.save({"a": torch.ones(1000)}, path)
    os.truncate(path, 2000)
    assert "is damaged or truncated" in _error(tmp_path)
    torch.save({"a": torch.ones(1000)}, path, _use_new_zipfile_serialization=False)
    assert "from before 1.6" in _error(tmp_path)
    path.write_bytes(b"")
    assert str(path) in _error(tmp_path)


def test_a_compressed_pickle_is_refused(tmp_path):
    """It could unpack to more than the memory holds."""
    path = _config(tmp_path) / "pytorch_model.bin"
    torch.save({"a": torch.ones(1000)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    assert "is compressed" in _error(tmp_path)


def test_safetensors_reads_the_same(folder):
    source = HuggingFaceFolder(folder)
    for file in source.files:
        for name, tensor in load_file(file).items():
            assert _same(source.read(name, whole(tuple(tensor.shape))), tensor)
