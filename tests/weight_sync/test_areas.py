"""A stream through one mapped file: both ends, and what each sees of the other's end."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from hybridflow.rollout.server_side.shared_memory_channel import open_channel
from hybridflow.rollout.server_side.sync_files import LoadFault
from hybridflow.weight_sync.areas import (
    AreaSender,
    StreamBroken,
    create_areas,
    reset_areas,
    stop_areas,
)

AREA = 4096
SPAWN = get_context("spawn")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_areas(tmp_path / "file", AREA)
    return tmp_path / "file"


def _sender(path: Path, seconds: float = 60.0) -> AreaSender:
    return AreaSender(path, AREA, "s", seconds)


def _channel(path: Path, seconds: float = 60.0):
    return open_channel({"file": path.name, "area": AREA, "name": "s"}, path.parent, seconds)


def _bucket(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    size = 1 + number * 271 % AREA
    return torch.randint(0, 255, (size,), dtype=torch.uint8, generator=generator)


def test_buckets_come_whole_and_in_order(path: Path):
    def send() -> None:
        sender = _sender(path)
        for number in range(50):
            bucket = _bucket(number)
            sender.area(number)[: len(bucket)].copy_(bucket)
            sender.commit(number)
        sender.close()

    for _ in range(2):
        reset_areas(path, AREA)
        channel = _channel(path)
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(send)
            for number in range(50):
                want = _bucket(number)
                assert torch.equal(channel.receive(number, len(want)), want)
                channel.release(number)
            sending.result()
        channel.close()


def test_at_most_two_buckets_are_under_way(path: Path):
    sender = _sender(path, seconds=0.2)
    for number in range(2):
        sender.area(number)
        sender.commit(number)
    with pytest.raises(StreamBroken, match=r"bucket 0 of stream s was not taken within 0.2 s"):
        sender.area(2)


def test_an_end_that_stops_is_named(path: Path):
    sender, channel = _sender(path), _channel(path)
    sender.commit(0)
    sender.close()
    channel.receive(0, 10)
    with pytest.raises(LoadFault, match="bucket 1 of stream s will not come: its sender stopped"):
        channel.receive(1, 10)
    channel.close()
    reset_areas(path, AREA)
    sender, channel = _sender(path), _channel(path)
    sender.commit(0)
    sender.commit(1)
    channel.close()
    with pytest.raises(StreamBroken, match="bucket 0 .* the server's loader stopped"):
        sender.area(2)
    reset_areas(path, AREA)
    sender.commit(1)
    stop_areas(path)
    with pytest.raises(StreamBroken, match="loader stopped"):
        sender.area(3)


def test_waits_end_at_their_deadline(path: Path):
    channel = _channel(path, seconds=0.2)
    with pytest.raises(LoadFault, match=r"did not come within 0.2 s; its sender has filled 0"):
        channel.receive(0, 10)
    with pytest.raises(LoadFault, match="has 4097 bytes, its area 4096"):
        channel.receive(0, AREA + 1)


def _die_sending(path: Path) -> None:
    sender = _sender(path)
    sender.commit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def _die_receiving(path: Path) -> None:
    channel = _channel(path)
    channel.receive(0, 10)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_sender_is_noticed_at_once(path: Path):
    channel = _channel(path, seconds=600.0)
    process = SPAWN.Process(target=_die_sending, args=(path,))
    process.start()
    channel.receive(0, 10)
    with pytest.raises(LoadFault, match="its sender died"):
        channel.receive(1, 10)
    process.join()


def test_a_killed_receiver_is_noticed_at_once(path: Path):
    sender = _sender(path, seconds=600.0)
    sender.commit(0)
    sender.commit(1)
    process = SPAWN.Process(target=_die_receiving, args=(path,))
    process.start()
    with pytest.raises(StreamBroken, match="the server's loader died"):
        sender.area(2)
    process.join()
