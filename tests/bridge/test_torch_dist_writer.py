"""Writing torch_dist checkpoints: chunk files that are cut off, and what becomes no checkpoint."""

import errno
import json
import multiprocessing
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bridge.source import TensorInfo, whole
from megatron_bridge.torch_dist.reader import TorchDist
from megatron_bridge.torch_dist.writer import ChunkFile, ChunkRecord, finish
from tests.bridge.chunks import add, info, same, write

WIDTH = 30_000
DEADLINE = 120.0  # seconds that a chunk may take to be written


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
        assert same(source.read(key, whole(tuple(part.shape))), part.detach())


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


def _write_until_killed(path: Path, pipe: Connection) -> None:
    file = ChunkFile(path)
    for number in range(10**6):
        record = file.add("t", (number, 0), torch.full((1, WIDTH), float(number)))
        file.sync()
        pipe.send_bytes(json.dumps(record.to_json()).encode())


def test_a_killed_file_goes_on_behind_its_last_record(tmp_path):
    path = tmp_path / "__0_0.distcp"
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(target=_write_until_killed, args=(path, send))
    process.start()
    try:
        lines = [receive.recv_bytes() for _ in range(5) if receive.poll(DEADLINE)]
    finally:
        process.kill()
        process.join()
    kept = [ChunkRecord.from_json(json.loads(line)) for line in lines]
    tensor = torch.arange(8.0)[:, None].expand(8, WIDTH)
    with ChunkFile(path, kept[-1].end) as file:
        assert path.stat().st_size == kept[-1].end
        records = kept + [add(file, "t", tensor, ((n, n + 1), (0, WIDTH))) for n in range(5, 8)]
    finish(tmp_path, {"t": info(tensor)}, records)
    assert torch.equal(TorchDist(tmp_path).read("t", whole((8, WIDTH))), tensor)


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


def _record(folder: Path, **changes: Any) -> ChunkRecord:
    with ChunkFile(folder / "x.distcp") as file:
        record = file.add("t", (0, 0), torch.zeros(2, 3))
    return ChunkRecord(**{**record.to_json(), **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"offsets": (1, 0)}, r"'t': the rectangle \[1:3, 0:3\] of a chunk is not inside"),
        ({"sizes": (1, 3)}, r"'t': no chunk covers element \[1, 0\]"),
        ({"dtype": "bfloat16"}, "'t' is float32 and has chunks of bfloat16"),
        ({"key": "v"}, "chunks of an unknown tensor 'v'; tensor 't': no chunk"),
        ({"file": "y.distcp"}, "y.distcp is missing"),
        ({"length": 10**6}, "x.distcp has"),
    ],
)
def test_records_that_are_not_the_tensor_make_no_checkpoint(tmp_path, changes, text):
    record = _record(tmp_path, **changes)
    with pytest.raises(ValueError, match=text):
        finish(tmp_path, {"t": TensorInfo(torch.float32, (2, 3))}, [record])
    assert {path.name for path in tmp_path.iterdir()} == {"x.distcp"}


def test_a_file_of_another_name_is_not_begun(tmp_path):
    with pytest.raises(ValueError, match="must end in .distcp"):
        ChunkFile(tmp_path / "chunks.bin")
    assert not list(tmp_path.iterdir())
