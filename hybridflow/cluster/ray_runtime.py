"""Starts or joins Ray. Ray reads its environment when it is imported, so nothing else in this
package imports it before ``connect`` has run."""

import logging
import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

_STARTED_FOLDERS: list[Path] = []


def start_local(slots: int, object_store_bytes: int) -> None:
    """Starts a Ray of this process alone. Ray's ports listen on every interface and whoever
    reaches them may run code, so a token that only this process knows guards them."""
    if "ray" not in sys.modules:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # Ray makes its workers nice, so that they starve beside whatever else runs here.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - so Ray spells it
    _quiet()
    import ray

    _refuse_second(ray)
    # A short path: it is part of the names of Unix sockets, which end at 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="hybridflow-ray-", dir="/tmp"))
    _STARTED_FOLDERS.append(folder)
    ray.init(
        num_cpus=slots,
        object_store_memory=object_store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(folder),
    )


def join(address: str) -> None:
    """Connects to the Ray that runs on this machine as part of the cluster at ``address``
    (HOST:PORT). A token that ``ray get-auth-token --generate`` made is used."""
    if "ray" not in sys.modules and (Path.home() / ".ray" / "auth_token").is_file():
        os.environ["RAY_AUTH_MODE"] = "token"
    _quiet()
    import ray

    _refuse_second(ray)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address}: start it with launch/ray_head.sh, and run the "
            f"driver on one of its nodes ({error})"
        ) from error


def leave() -> None:
    """Disconnects; a Ray started by this process ends, and its files go."""
    import ray

    ray.shutdown()
    while _STARTED_FOLDERS:
        shutil.rmtree(_STARTED_FOLDERS.pop(), ignore_errors=True)


def _quiet() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "1"  # hides devices; silences a notice


def _refuse_second(ray: object) -> None:
    if ray.is_initialized():  # type: ignore[attr-defined]
        raise ValueError("this process uses Ray already; close that session before a new one")
