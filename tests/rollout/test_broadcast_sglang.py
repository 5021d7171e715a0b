"""The real SGLang takes whole tensors over its own broadcast."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybridflow.rollout import (
    RolloutClient,
    RolloutError,
    Sampling,
    Server,
    ServerConfig,
    start_server,
)
from hybridflow.rollout.client import RolloutTimeout
from hybridflow.weight_sync import server_checksum
from hybridflow.weight_sync.broadcast import BroadcastInbox, stream_name, tell
from hybridflow.weight_sync.pairs import Listener, PairError, PairTimeout, connect
from hybridflow.weight_sync.pairs.broadcast_group import BroadcastGroup
from tests.rollout.broadcast_cases import broadcast, config, weights, wiring
from tests.servers import TOKEN
from tests.tiny_models import make_model

PROMPTS = [[5, 17, 33], [40, 8, 9, 10]]
pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(900)]


def _start(folder: Path, tp: int) -> tuple[Server, RolloutClient]:
    server = start_server(ServerConfig("sglang", folder, tp=tp, token=TOKEN, start_timeout=400))
    return server, server.client(timeout=120)


def _tokens(client: RolloutClient) -> list:
    groups = client.generate(PROMPTS, 1, Sampling(8, temperature=0.0))
    return [sample.tokens for group in groups for sample in group]


@pytest.mark.parametrize(
    ("family", "tp", "changes"),
    [("qwen3", 1, {}), ("qwen3", 2, {}), ("llama", 2, {"tie_word_embeddings": True})],
)
def test_a_broadcast_equals_a_load_from_disk(tmp_path: Path, family, tp, changes):
    model = make_model(tmp_path / "model", family, **changes)
    other = make_model(tmp_path / "other", family, seed=5, **changes)
    server, client = _start(model, tp)
    try:
        before, first = client.checksum(), _tokens(client)
        for version, bucket in ((1, 30_000), (2, 1 << 30)):
            client.pause()
            wired = wiring(model, tp, bucket=bucket)
            inbox, sent = broadcast(client, wired, lambda: weights(other), version, tmp_path)
            digest = inbox.check(client, version, [sent])
            client.set_version(version)
            client.continue_()
            assert sent is not None and sent.bytes == inbox.bytes
            assert sent.bytes == sum(tensor.nbytes for _, tensor in weights(other))
            assert digest == server_checksum(weights(other), config(other), tp) != before
            pushed = _tokens(client)
            client.update_from_disk(other)
            assert client.checksum() == digest and _tokens(client) == pushed
            client.update_from_disk(model)
            assert client.checksum() == before and _tokens(client) == first
    finally:
        client.close()
        server.stop()


def test_a_broken_broadcast_is_named_and_the_next_one_is_whole(tmp_path: Path):
    model = make_model(tmp_path / "model")
    other = make_model(tmp_path / "other", seed=5)
    server, client = _start(model, 1)
    try:
        client.pause()
        with pytest.raises(PairTimeout, match="no peer came for broadcast to engine 0"):
            BroadcastInbox(wiring(model, 1, seconds=2.0), 0, tmp_path, Listener()).load(client, 1)

        def breaks():
            for number, pair in enumerate(weights(other)):
                if number == 9:
                    raise ArithmeticError("the trainer fails")
                yield pair

        with pytest.raises(ArithmeticError):
            broadcast(client, wiring(model, 1), breaks, 1, tmp_path)
        inbox, sent = broadcast(client, wiring(model, 1), lambda: weights(other), 2, tmp_path)
        assert inbox.check(client, 2, [sent]) == server_checksum(weights(other), config(other))
        client.continue_()
        assert _tokens(client)
    finally:
        client.close()
        server.stop()


def test_a_server_killed_meanwhile_is_named_on_both_sides(tmp_path: Path):
    model = make_model(tmp_path / "model")
    server, client = _start(model, 1)
    try:
        client.pause()

        def kills():
            for number, pair in enumerate(weights(model)):
                if number == 9:
                    os.kill(server.pid, signal.SIGTERM)
                    while server.alive():
                        time.sleep(0.05)
                yield pair

        wired = wiring(model, 1, bucket=1000, seconds=30.0)
        with pytest.raises((RolloutError, PairError)):
            broadcast(client, wired, kills, 1, tmp_path)
    finally:
        client.close()
        server.stop()


def test_a_trainer_that_dies_before_it_joins_ends_at_the_deadline(tmp_path: Path):
    model = make_model(tmp_path / "model")
    server, client = _start(model, 1)
    listener = Listener()
    group = BroadcastGroup("gloo", "127.0.0.1", 2, "never", 5.0)  # rank 0 never joins it
    try:
        client.pause()
        inbox = BroadcastInbox(wiring(model, 1, seconds=10.0), 0, tmp_path, listener)
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(inbox.load, client, 1)
            channel = connect(inbox.open(1), stream_name(0), 60.0)
            tell(channel, 0, group.invitation)
            with pytest.raises(RolloutTimeout, match="init_weights_update_group did not answer"):
                loading.result()
            assert "init_weights_update_group" in (channel.last_words() or "")
    finally:
        listener.close()
        client.close()
        server.stop()
