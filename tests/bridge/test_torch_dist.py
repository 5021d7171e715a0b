"""Reading torch_dist checkpoints: any tiling in any rectangle, without memory for it."""

import json
import multiprocessing
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, load

from megatron_bridge.source import Ranges, whole
from megatron_bridge.torch_dist.reader import TorchDist, find
from megatron_bridge.torch_dist.tiling import Tiling
from megatron_bridge.torch_dist.writer import ChunkFile, ChunkRecord, finish
from tests.bridge.chunks import add, index, info, same, write

ROWS = 16_384
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


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
@settings(max_examples=40, deadline=None)
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
                add((one, two)[number % 2], "t", tensor, ranges)
                for number, ranges in enumerate(tiling)
            ]
        finish(folder, {"t": info(tensor)}, records)
        source = TorchDist(folder)
        assert source.tensors() == {"t": info(tensor)}
        for _ in range(4):
            ranges = data.draw(_rectangles(shape))
            assert same(source.read("t", ranges), tensor[index(ranges)])
        target = {"t": torch.zeros(shape, dtype=dtype)}
        load(target, storage_reader=FileSystemReader(folder), no_dist=True)
        assert same(target["t"], tensor)


@settings(max_examples=100, deadline=None)
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
        count[index(ranges)] += 1
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


def test_many_files_need_few_descriptors(tmp_path):
    tensor = torch.arange(100)
    records = []
    for number in range(100):
        with ChunkFile(tmp_path / f"__{number}_0.distcp") as file:
            records.append(add(file, "t", tensor, ((number, number + 1),)))
    finish(tmp_path, {"t": info(tensor)}, records)
    before = len(list(Path("/proc/self/fd").iterdir()))
    source = TorchDist(tmp_path)
    assert torch.equal(source.read("t", ((0, 100),)), tensor)
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 64


def _anonymous() -> int:
    """Resident memory of this process that no file backs, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def _read_all_over(folder: Path, pipe: Connection) -> None:
    before = _anonymous()
    source = TorchDist(folder)
    for row in range(0, ROWS, 16):
        source.read("t", ((row, row + 1), (0, 1024))).sum()
    pipe.send(_anonymous() - before)


def test_reading_costs_no_memory_of_the_chunks_size(tmp_path):
    """One chunk of 64 MiB, of which rows all over are read."""
    write(tmp_path, {"t": torch.empty(ROWS, 1024)})
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(target=_read_all_over, args=(tmp_path, send))
    process.start()
    try:
        assert receive.poll(120), "the reading process said nothing for 120 s"
        grown = receive.recv()
    finally:
        process.kill()
        process.join()
    assert grown < 8 * 2**20, grown


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
