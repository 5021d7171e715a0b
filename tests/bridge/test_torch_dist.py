"""torch_dist checkpoints: any tiling read in any rectangle, files cut off, memory."""

import errno
import json
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load

from megatron_bridge.source import Ranges, TensorInfo, whole
from megatron_bridge.torch_dist.reader import TorchDist, find
from megatron_bridge.torch_dist.tiling import Tiling
from megatron_bridge.torch_dist.writer import ChunkFile, ChunkRecord, finish

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal in every bit, whatever the dtype can compare."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(_bytes(one), _bytes(other))


def _index(ranges: Ranges) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in ranges)


def _info(tensor: Tensor) -> TensorInfo:
    return TensorInfo(tensor.dtype, tuple(tensor.shape))


def _add(file: ChunkFile, key: str, tensor: Tensor, ranges: Ranges) -> ChunkRecord:
    return file.add(key, [start for start, _ in ranges], tensor[_index(ranges)])


def write(folder: Path, tensors: dict[str, Tensor], **common: Any) -> list[ChunkRecord]:
    """A checkpoint of whole tensors in one file."""
    folder.mkdir(exist_ok=True)
    with ChunkFile(folder / "__0_0.distcp") as file:
        records = [_add(file, key, t, whole(tuple(t.shape))) for key, t in tensors.items()]
    finish(folder, {key: _info(tensor) for key, tensor in tensors.items()}, records, common)
    return records


@st.composite
def _tilings(draw: st.DrawFn, ranges: Ranges) -> list[Ranges]:
    """Random cuts of a rectangle, each piece cut further along any dimension."""
    cuttable = [i for i, (start, stop) in enumerate(ranges) if stop - start > 1]
    if not cuttable or draw(st.integers(0, 3)) == 0:
        return [ranges]
    axis = draw(st.sampled_from(cuttable))
    start, stop = ranges[axis]
    at = draw(st.integers(start + 1, stop - 1))
    halves = [(start, at), (at, stop)]
    return [
        piece
        for half in halves
        for piece in draw(_tilings((*ranges[:axis], half, *ranges[axis + 1 :])))
    ]


@st.composite
def _rectangles(draw: st.DrawFn, shape: tuple[int, ...]) -> Ranges:
    pairs = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return tuple((start, stop) for start, stop in pairs)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_tiling_is_read_in_any_rectangle(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=4)))
    dtype = data.draw(st.sampled_from(DTYPES))
    tensor = torch.randint(0, 200, shape).to(dtype)
    tiling = data.draw(st.permutations(data.draw(_tilings(whole(shape)))))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ChunkFile(folder / "a.distcp") as one, ChunkFile(folder / "b.distcp") as two:
            records = [
                _add((one, two)[number % 2], "t", tensor, ranges)
                for number, ranges in enumerate(tiling)
            ]
        finish(folder, {"t": _info(tensor)}, records)
        source = TorchDist(folder)
        assert source.tensors() == {"t": _info(tensor)}
        for _ in range(4):
            ranges = data.draw(_rectangles(shape))
            assert _same(source.read("t", ranges), tensor[_index(ranges)])
        target = {"t": torch.zeros(shape, dtype=dtype)}
        load(target, storage_reader=FileSystemReader(folder), no_dist=True)
        assert _same(target["t"], tensor)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_holes_and_overlaps_are_found(data):
    """Against counting how often each element is covered."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    rectangles = data.draw(_tilings(whole(shape)))
    change = data.draw(st.sampled_from(["none", "drop", "add", "replace"]))
    if change in ("drop", "replace"):
        rectangles.pop(data.draw(st.integers(0, len(rectangles) - 1)))
    if change in ("add", "replace"):
        rectangles.append(data.draw(_rectangles(shape)))
    count = torch.zeros(shape, dtype=torch.int)
    for ranges in rectangles:
        count[_index(ranges)] += 1
    if bool((count == 1).all()):
        Tiling(shape, rectangles)
        return
    with pytest.raises(ValueError) as error:
        Tiling(shape, rectangles)
    said, _, element = str(error.value).rpartition(" element ")
    covered = int(count[tuple(json.loads(element))])
    assert said == ("no chunk covers" if covered == 0 else f"{covered} chunks cover")


def test_one_chunk_is_a_view_of_the_file(tmp_path):
    tensor = torch.arange(35, dtype=torch.float32).reshape(5, 7)
    record = write(tmp_path, {"t": tensor})[0]
    read = TorchDist(tmp_path).read("t", ((1, 4), (2, 6)))
    assert torch.equal(read, tensor[1:4, 2:6])
    assert read.stride() == (7, 1)
    assert read.untyped_storage().nbytes() == tensor.nbytes
    assert record == ChunkRecord.from_json(json.loads(json.dumps(record.to_json())))


def test_a_view_is_written_alone(tmp_path):
    """Neither the rest of its storage nor its strides, gradients or class."""
    big = torch.arange(60_000, dtype=torch.bfloat16).reshape(300, 200)
    parts = {
        "rows": big[7:9],
        "columns": big[:, 3],
        "transposed": big[:4, :5].t(),
        "parameter": torch.nn.Parameter(big[1, :3]),
    }
    records = write(tmp_path, parts)
    assert sum(record.length for record in records) < 10_000
    source = TorchDist(tmp_path)
    for key, part in parts.items():
        assert _same(source.read(key, whole(tuple(part.shape))), part.detach())


def test_the_states_that_stock_models_look_for_are_there(tmp_path):
    """By the names that transformer-engine's modules have in Megatron."""
    shapes = {
        "embedding.word_embeddings.weight": (8, 4),
        "decoder.layers.self_attention.linear_proj.weight": (2, 4, 4),
        "decoder.layers.mlp.experts.experts.linear_fc2.weight": (2, 3, 4, 4),
        "decoder.layers.mlp.router.weight": (2, 3, 4),
        "decoder.final_layernorm.weight": (4,),
        "bridge.model.norm.weight": (4,),
    }
    write(tmp_path, {key: torch.zeros(shape) for key, shape in shapes.items()})
    experts = [f"shard_{layer}.{expert}_2.3" for layer in range(2) for expert in range(3)]
    layers = "decoder.layers"
    assert set(TorchDist(tmp_path).objects()) == {
        *(f"{layers}.self_attention.linear_proj._extra_state/shard_{n}_2" for n in range(2)),
        *(f"{layers}.self_attention.core_attention._extra_state/shard_{n}_2" for n in range(2)),
        *(f"{layers}.mlp.experts.experts.linear_fc2._extra_state/{place}" for place in experts),
        "decoder.final_layernorm._extra_state/shard_0_1",
    }


def test_the_states_of_layers_that_differ(tmp_path):
    key = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
    write(tmp_path, {key: torch.zeros(2, 4, 4), key.replace("experts.experts.", ""): torch.ones(3)})
    module = "decoder.layers.1.mlp"
    assert set(TorchDist(tmp_path).objects()) == {
        f"{module}.experts.experts.linear_fc1._extra_state/shard_0_2",
        f"{module}.experts.experts.linear_fc1._extra_state/shard_1_2",
        f"{module}.linear_fc1._extra_state/shard_0_1",
    }


def test_many_files_need_few_descriptors(tmp_path):
    tensor = torch.arange(400)
    records = []
    for number in range(400):
        with ChunkFile(tmp_path / f"__{number}_0.distcp") as file:
            records.append(_add(file, "t", tensor, ((number, number + 1),)))
    finish(tmp_path, {"t": _info(tensor)}, records)
    before = len(list(Path("/proc/self/fd").iterdir()))
    source = TorchDist(tmp_path)
    assert torch.equal(source.read("t", ((0, 400),)), tensor)
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 64


_KILLED = """
    import json, sys, torch
    from megatron_bridge.torch_dist.writer import ChunkFile
    file = ChunkFile(sys.argv[1])
    for number in range(10**6):
        record = file.add("t", (number, 0), torch.full((1, 50_000), float(number)))
        file.sync()
        print(json.dumps(record.to_json()), flush=True)
"""


def test_a_killed_file_goes_on_behind_its_last_record(tmp_path):
    path = tmp_path / "__0_0.distcp"
    command = [sys.executable, "-c", textwrap.dedent(_KILLED), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        process.send_signal(signal.SIGKILL)
    kept = [ChunkRecord.from_json(json.loads(line)) for line in lines]
    tensor = torch.arange(8.0)[:, None].expand(8, 50_000)
    with ChunkFile(path, kept[-1].end) as file:
        assert path.stat().st_size == kept[-1].end
        records = kept + [_add(file, "t", tensor, ((n, n + 1), (0, 50_000))) for n in range(5, 8)]
    finish(tmp_path, {"t": TensorInfo(torch.float32, (8, 50_000))}, records)
    assert torch.equal(TorchDist(tmp_path).read("t", whole((8, 50_000))), tensor)


def test_a_file_shorter_than_its_journal_is_not_resumed(tmp_path):
    path = tmp_path / "a.distcp"
    with ChunkFile(path) as file:
        record = file.add("t", (0,), torch.zeros(3))
    with pytest.raises(ValueError, match="cannot be resumed"):
        ChunkFile(path, record.end + 1)
    assert path.stat().st_size == record.end


def test_a_full_disk_leaves_the_chunks_before(tmp_path):
    """The limit on a file's size stands for the disk's end."""
    path = tmp_path / "a.distcp"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with ChunkFile(path) as file:
            first = file.add("t", (0,), torch.zeros(1000))
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
            with pytest.raises(OSError) as error:
                file.add("t", (1000,), torch.zeros(100_000))
            assert error.value.errno == errno.EFBIG
            second = file.add("t", (1000,), torch.ones(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    finish(tmp_path, {"t": TensorInfo(torch.float32, (2000,))}, [first, second])
    assert TorchDist(tmp_path).read("t", ((999, 1001),)).tolist() == [0.0, 1.0]


_READ_SMALL = """
    import sys, torch
    from megatron_bridge.torch_dist.reader import TorchDist

    def anonymous():
        lines = open("/proc/self/status").read().splitlines()
        return int(next(l for l in lines if l.startswith("RssAnon")).split()[1]) * 1024

    warm = TorchDist(sys.argv[1]).read("small", ((0, 1),)).clone()
    before = anonymous()
    source = TorchDist(sys.argv[1])
    rows = [source.read("big", ((i, i + 1), (0, 1024))).sum() for i in range(0, 65536, 16)]
    print(anonymous() - before)
"""


def test_reading_costs_no_memory_of_the_chunks_size(tmp_path):
    """A 256 MiB chunk, of which rows all over are read."""
    big = torch.empty(65_536, 1024)
    write(tmp_path, {"small": torch.zeros(1), "big": big})
    command = [sys.executable, "-c", textwrap.dedent(_READ_SMALL), str(tmp_path)]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown < 16 * 2**20, grown


def test_the_latest_checkpoint_is_found(tmp_path):
    assert find(tmp_path) is None
    assert find(tmp_path / "absent") is None
    write(tmp_path / "iter_0000012", {"t": torch.zeros(1)})
    write(tmp_path / "release", {"t": torch.zeros(1)})
    assert find(tmp_path / "release") == tmp_path / "release"
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    for text, name in [("12\n", "iter_0000012"), ("release", "release")]:
        latest.write_text(text)
        assert find(tmp_path) == tmp_path / name
    latest.write_text("13")
    with pytest.raises(ValueError, match="names iter_0000013, which is missing"):
        find(tmp_path)
    (tmp_path / "iter_0000013").mkdir()
    with pytest.raises(ValueError, match="--ckpt-convert-format torch_dist"):
        find(tmp_path)
    latest.write_text("../../etc")
    with pytest.raises(ValueError, match="neither an iteration nor 'release'"):
        find(tmp_path)
