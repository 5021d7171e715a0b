"""The loader as it runs inside a server, in a process of its own with parameters on the GPU."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from hybridflow.rollout import loading
from hybridflow.rollout.server_side.hybridflow_loader import serve
from hybridflow.rollout.server_side.sync_files import SYNC_FOLDER

_SPAWN = get_context("spawn")
_SECONDS = 120.0


class LoaderProcess:
    """Answers as a paused server's client does; leaving it ends the process.

    Args:
        folder: the sync folder.
        parameters: name, dtype and shape of each; all are zero at first.
    """

    url = "loader"

    def __init__(self, folder: Path, parameters: list[list[Any]]) -> None:
        self._here, there = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(there, str(folder), parameters))
        self.process.start()

    def load_through(
        self, folder: str | Path, controls: Sequence[dict[str, Any]], *, flush_cache: bool = True
    ) -> list[Any]:
        """See ``RolloutClient.load_through``; there is one rank."""
        nonce = uuid.uuid4().hex
        (control,) = [
            {"nonce": nonce, **told, "rank": 0, "status": f"status-{nonce}.json"}
            for told in controls
        ]
        self._here.send(json.dumps(control))
        assert self._here.poll(_SECONDS), "the loader has not answered"
        self._here.recv()
        status = loading.take_status(Path(folder) / control["status"])
        return loading.all_loaded(self.url, [control], [status], None)

    def checksum(self) -> str:
        """SGLang's own on a GPU is another hash than ours; nothing asks for it there."""
        raise AssertionError("the loader's own digests prove a server on a GPU")

    def __enter__(self) -> LoaderProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._here.close()  # the process reads an end
        self.process.join(_SECONDS)
        assert self.process.exitcode == 0


def _serve(requests: Connection, folder: str, parameters: list[list[Any]]) -> None:
    os.environ[SYNC_FOLDER] = folder
    live = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda")
        for name, dtype, shape, *_ in parameters
    }
    while True:
        try:
            text = requests.recv()
        except EOFError:
            return
        serve(live, 0, text)
        requests.send("done")
