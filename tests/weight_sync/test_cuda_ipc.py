"""Streams between two ranks on one GPU: all of them that needs no GPU."""

import base64
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.rollout.server_side.cuda_ipc_channel import DeviceMemory, read_message
from hybridflow.rollout.server_side.hybridflow_loader import serve
from hybridflow.rollout.server_side.shared_memory_channel import SharedMemoryChannel, open_channel
from hybridflow.rollout.server_side.sync_files import SYNC_FOLDER, LoadFault
from hybridflow.weight_sync.areas import StreamBroken, create_areas
from hybridflow.weight_sync.bucketed import BucketedReceiver
from hybridflow.weight_sync.cuda_ipc import ROOM, Turns, message, share_a_device
from megatron_bridge import reshard
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.reshard import Seat
from tests.tiny_models import make_model
from tests.weight_sync.shards import planned

HANDLE = bytes(range(64))
TOLD = {"kind": "cuda_ipc", "device": "GPU-1", "handle": base64.b64encode(HANDLE).decode()}


def test_a_message_says_where_a_bucket_is():
    text = message("GPU-1", HANDLE, 1 << 21)
    assert len(text) == ROOM
    assert read_message(text, "s") == DeviceMemory("GPU-1", HANDLE, 1 << 21)


@pytest.mark.parametrize(
    "told",
    [
        {**TOLD, "bytes": 0},
        {**TOLD, "bytes": True},
        {**TOLD, "bytes": "8"},
        {**TOLD, "bytes": 8, "more": 1},
        {**TOLD, "bytes": 8, "kind": "pickle"},
        {**TOLD, "bytes": 8, "handle": base64.b64encode(HANDLE[1:]).decode()},
        {**TOLD, "bytes": 8, "handle": "\u00e4" * 88},
        {**TOLD, "bytes": 8, "handle": "=?" * 44},
        TOLD,
        [],
        None,
    ],
)
def test_anything_else_is_refused(told: Any):
    with pytest.raises(LoadFault, match="stream s: its sender does not say"):
        read_message(json.dumps(told).encode().ljust(ROOM), "s")
    with pytest.raises(LoadFault, match="stream s"):
        read_message(b"\x80\x04K\x01." + bytes(ROOM - 5), "s")


def test_ranks_on_one_gpu_and_no_others_share_it(tmp_path: Path):
    gpus = [Seat("here", 0), Seat("here", 1)]
    assert share_a_device(gpus[0], Seat("here", 0))
    assert not share_a_device(gpus[0], Seat("there", 0))
    assert not share_a_device(Seat("here", None), Seat("here", None))
    model = make_model(tmp_path / "model")
    routes = reshard.route(planned(model, ParallelLayout(tp=4), 2), gpus + gpus, [gpus])
    receiver = BucketedReceiver(routes, 0, tmp_path, bucket=100_000, device="cuda")
    areas = {stream: area for stream, (_, area) in receiver.open(1).areas.items()}
    receiver.close()
    on_device = {(source, rank) for source, rank in areas if source % 2 == rank}
    assert on_device and on_device != set(areas)
    assert all((area == ROOM) == (stream in on_device) for stream, area in areas.items())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_areas(tmp_path / "file", ROOM)
    return tmp_path / "file"


def _turns(path: Path, seconds: float = 60.0) -> Turns:
    return Turns(path, ROOM, "s", seconds)


def _channel(path: Path) -> SharedMemoryChannel:
    return open_channel({"file": path.name, "area": ROOM, "name": "s"}, path.parent, 60.0)


def test_memory_is_the_senders_again_when_the_receiver_has_let_go(path: Path):
    turns, channel = _turns(path), _channel(path)
    for number in range(2):
        turns.area(number)
        turns.commit(number)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(turns.wait_until_taken)
        for number in range(2):
            channel.receive(number, ROOM)
            assert not taken.done()
            channel.release(number)
        taken.result()
        withdrawn = pool.submit(turns.withdraw)
        assert not withdrawn.done()
        channel.close()
        assert withdrawn.result()
    turns.close()


def test_a_receiver_that_holds_on_keeps_the_memory(path: Path):
    turns, channel = _turns(path, seconds=0.2), _channel(path)
    assert not turns.withdraw()
    channel.close()
    assert turns.withdraw()
    turns.close()


def test_a_receiver_that_starts_late_finds_nothing(path: Path):
    turns = _turns(path, seconds=0.2)
    turns.area(0)
    turns.commit(0)
    with pytest.raises(StreamBroken, match="bucket 0 of stream s was not taken within"):
        turns.wait_until_taken()
    assert turns.withdraw()
    turns.close()
    channel = _channel(path)
    with pytest.raises(LoadFault, match="its sender stopped"):
        channel.receive(0, ROOM)
    channel.close()


@pytest.mark.parametrize(
    ("kind", "fault"), [("cuda_ipc", "is on a GPU, .* on cpu"), ("nccl", "unknown kind 'nccl'")]
)
def test_a_loader_without_a_gpu_refuses_before_it_touches_anything(
    kind: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(SYNC_FOLDER, str(tmp_path))
    create_areas(tmp_path / "file", ROOM)
    stream = {"name": "s", "kind": kind, "file": "file", "area": ROOM, "buckets": []}
    control = {
        "operation": "bucketed",
        "nonce": "n",
        "rank": 0,
        "status": "status.json",
        "deadline": 60.0,
        "parameters": [["w", "float32", [4]]],
        "streams": [stream],
    }
    serve({"w": torch.zeros(4)}, 0, json.dumps(control))
    status = json.loads((tmp_path / "status.json").read_text())
    assert not status["ok"] and not status["touched"]
    assert re.search(fault, status["error"])
