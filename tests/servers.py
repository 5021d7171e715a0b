"""The rollout servers of one test session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hybridflow.rollout import RolloutClient, Server, ServerConfig, start_server

TOKEN = "s3cret-of-the-tests"


@dataclass
class Rollout:
    """A session's server, its model folder, and a version counter that only grows."""

    server: Server
    client: RolloutClient
    model: Path
    versions: int = 0

    def next_version(self) -> int:
        """A version number that this server has not seen."""
        self.versions += 1
        return self.versions


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied Qwen3."""
    from tests.tiny_models import make_model  # torch and transformers only where they are used

    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def _serve(engine: str, model: Path, logs: Path) -> Iterator[Rollout]:
    config = ServerConfig(
        engine,
        model,
        log_path=logs / f"{engine}.log",
        start_timeout=250,
        request_timeout=120,
        max_running_requests=64,
        token=TOKEN,
    )
    server = start_server(config)
    try:
        yield Rollout(server, server.client(), model)
    finally:
        server.stop()


@pytest.fixture(scope="session")
def local_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollout]:
    """The session's local engine."""
    yield from _serve("local", tiny_model, tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="session")
def sglang_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollout]:
    """The session's real SGLang server; only tests marked `sglang` may ask for it."""
    yield from _serve("sglang", tiny_model, tmp_path_factory.mktemp("logs"))


@pytest.fixture(params=["local", pytest.param("sglang", marks=pytest.mark.sglang)])
def rollout_server(request: pytest.FixtureRequest) -> Rollout:
    """Either engine: the conformance suite runs against both."""
    return request.getfixturevalue(f"{request.param}_server")


def load_and_prove(client: RolloutClient, folder: Path, version: int, expected: str) -> None:
    """Have a server load a folder, compare its digest, and serve it as `version`.

    Raises:
        WeightMismatch: the digest is another; the server stays paused under the old name.
    """
    from hybridflow.weight_sync import WeightMismatch  # imports torch

    client.pause("retract")
    client.update_from_disk(folder)
    if (found := client.checksum()) != expected:
        raise WeightMismatch(f"{client.url} shows {found[:16]}, not {expected[:16]}")
    client.set_version(version)
    client.continue_()
