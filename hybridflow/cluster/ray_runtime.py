"""Starts or joins Ray. Ray reads its environment when it is imported, so nothing else in this
package imports it before ``connect`` has run."""

import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from hybridflow import owned
from hybridflow.cluster.processes import MARK, end_marked, marked

FOLDERS = "hybridflow-ray-"
_ENDING = {signal.SIGTERM, signal.SIGHUP}
_SHUTDOWN_SECONDS = 30.0
_STARTED_FOLDERS: list[Path] = []


def start_local(slots: int, object_store_bytes: int, mark: str) -> None:
    """Starts a Ray of this process alone. Ray's ports listen on every interface and whoever
    reaches them may run code, so a token that only this process knows guards them.
    ``mark`` is in the environment of Ray's own processes.

    ``RuntimeError`` when it does not start, with what this machine has to do."""
    if "ray" not in sys.modules:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # Ray makes its workers nice, so that they starve beside whatever else runs here.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - so Ray spells it
    _quiet()
    import ray

    # A short path: it is part of the names of Unix sockets, which end at 107 characters.
    folder = owned.make(Path("/tmp"), FOLDERS)
    _STARTED_FOLDERS.append(folder)
    try:
        with _marked(mark), _signals_kept():
            ray.init(
                address="local",  # whatever RAY_ADDRESS says
                num_cpus=slots,
                object_store_memory=object_store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder),
            )
    except BaseException as error:
        leave(mark)  # Ctrl-C, say, when half of it runs
        if isinstance(error, Exception):
            raise RuntimeError(_why_not(error)) from error
        raise


def _why_not(error: Exception) -> str:
    """Ray's first sentence, with what this machine has to do: it starts several processes, and
    gives them half a minute."""
    reason = str(error).split(". ")[0].strip().rstrip(".") or type(error).__name__
    free = psutil.virtual_memory().available / 1e9
    return (
        f"Ray did not start on this machine: {reason} (load {os.getloadavg()[0]:.0f} on "
        f"{os.cpu_count()} cores, {free:.1f} GB of memory free). Try again when the machine has "
        "less to do, or start Ray with launch/ray_head.sh and give its --address"
    )


def join(address: str) -> None:
    """Connects to the Ray that runs on this machine as part of the cluster at ``address``
    (HOST:PORT). A token that ``ray get-auth-token --generate`` made is used."""
    if "ray" not in sys.modules and (Path.home() / ".ray" / "auth_token").is_file():
        os.environ["RAY_AUTH_MODE"] = "token"
    _quiet()
    import ray

    try:
        with _signals_kept():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address}: start it with launch/ray_head.sh, and run the "
            f"driver on one of its nodes ({error})"
        ) from error


def leave(mark: str) -> None:
    """Disconnects; a Ray that ``start_local`` started with ``mark`` ends, and its files go."""
    import ray

    try:
        with _ended_with_raylet(mark):
            ray.shutdown()
    finally:
        end_marked(mark)
        while _STARTED_FOLDERS:
            owned.remove(_STARTED_FOLDERS.pop())


@contextmanager
def _ended_with_raylet(mark: str) -> Iterator[None]:
    """Within it all processes of ``mark`` end as soon as its raylet has.

    ``ray.shutdown`` asks one after the other by SIGTERM, which they do not heed, and gives each a
    second before it kills it.
    """
    raylets = [p for p in marked(mark) if p.name() == "raylet"] if _STARTED_FOLDERS else []

    def follow() -> None:
        psutil.wait_procs(raylets, timeout=_SHUTDOWN_SECONDS)
        if not any(raylet.is_running() for raylet in raylets):
            end_marked(mark, patience=0.0)

    follower = threading.Thread(target=follow, name="ray-end", daemon=True)
    if raylets:
        follower.start()
    yield
    if raylets:
        follower.join(_SHUTDOWN_SECONDS)


def _quiet() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "1"  # hides devices; silences a notice
    # A death is reported by its group, with role and rank; Ray's own account would come first.
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "A worker died or was killed while executing a task"


@contextmanager
def _marked(mark: str) -> Iterator[None]:
    before = os.environ.get(MARK)
    os.environ[MARK] = mark
    try:
        yield
    finally:
        if before is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = before


@contextmanager
def _signals_kept() -> Iterator[None]:
    """The signals that end a run are the driver's alone.

    `timeout`, `scancel` and systemd send SIGTERM to every process of a job. Ray's would end at
    once, and the driver's orderly end would wait for them in vain: they start with these signals
    blocked, and end when the driver ends them. Those that arrive meanwhile are delivered after it.
    Ray also sets a handler of its own for SIGTERM, which ends the process at once.
    """
    before = signal.getsignal(signal.SIGTERM)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def refuse_second() -> None:
    """ValueError when this process uses Ray: closing a session would end that of the other."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        raise ValueError("this process uses Ray already; close that session before a new one")
