"""The control port's life: opened with the run, known to its folder, closed at its end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridflow.dataflow.control.pulse import Pulse
from hybridflow.dataflow.control.routes import while_starting
from hybridflow.dataflow.control.server import ControlServer
from hybridflow.dataflow.run_folder import write_aside
from hybridflow.recipe.schema_control import ControlSection

ADDRESS_FILE = "control.json"


@contextmanager
def listening(control: ControlSection | None) -> Iterator[ControlServer | None]:
    """The port, which tells its health from now on; None where the recipe wants none.

    Raises:
        ValueError: the address cannot be had, or the token is missing.
    """
    if control is None:
        yield None
        return
    try:
        server = ControlServer(control.host, control.port, _token(control))
    except OSError as error:
        raise ValueError(
            f"control: {control.host}:{control.port} cannot be listened on: {error}; name another "
            "port, or 0 for any"
        ) from error
    server.start(while_starting(Pulse(), control))
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def announced(server: ControlServer | None, folder: Path) -> Iterator[None]:
    """The run's folder keeps the port's address in ``control.json`` while the block runs. One that
    a killed run left is of a port that somebody else may have by now, and goes."""
    address = folder / ADDRESS_FILE
    address.unlink(missing_ok=True)
    if server is None:
        yield
        return
    try:
        write_aside(address, json.dumps({"url": server.url, "pid": os.getpid()}))
        yield
    finally:
        address.unlink(missing_ok=True)


def _token(control: ControlSection) -> str | None:
    if control.token_env is None:
        if control.is_loopback:
            return None
        raise ValueError("control.host: other machines need a token; set control.token_env")
    token = os.environ.get(control.token_env, "").strip()
    if not token:
        raise ValueError(
            f"control.token_env: the environment has no {control.token_env}; set it to a secret of "
            "your choice before the run"
        )
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError(
            f"control.token_env: {control.token_env} holds characters that no HTTP header carries "
            "whole; use ASCII letters, digits and signs"
        )
    return token
