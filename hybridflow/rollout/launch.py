"""Starting and ending a rollout server of either engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from hybridflow import owned
from hybridflow.recipe.names import hint
from hybridflow.recipe.served import GPU_ONLY, NEVER_TIED
from hybridflow.rollout import commands, supervise
from hybridflow.rollout.client import RolloutClient, RolloutTimeout

FOLDERS = "hybridflow-rollout-"
_TAIL_LINES = 40
_PORT_TAKEN = "address already in use"
_PORT_TRIES = 3
_STOP_SECONDS = 15.0


class ServerDied(RuntimeError):
    """A server process ended by itself. The text holds `log`, the end of its log."""

    def __init__(self, reason: str, log_path: Path, log: str) -> None:
        super().__init__(f"{reason}. The end of {log_path}:\n{log}")
        self.reason, self.log = reason, log


@dataclass(frozen=True)
class ServerConfig:
    """One rollout server.

    `python` is the interpreter of SGLang's venv (default `.venv-sglang/bin/python` of the
    checkout); the local engine runs in this one. `log_path` None keeps the log until `stop`. A
    `host` beyond loopback needs a `token`, without which a server does nothing but say that it
    lives; it travels in a file that only this user reads. `threads` are per rank; experts are
    spread over `ep` groups of the `tp` ranks. Without `prefix_cache` SGLang begins each prompt
    anew; the local engine keeps no prefixes. `sync_folder` is the only folder that published shards
    may come from (see `server_side`); None: they may not. `gpus` are the machine's GPUs that its
    ranks use, in their order; None: the first ones that this process sees.
    """

    engine: str
    model_path: str | Path
    dtype: str = "float32"
    device: str = "cpu"
    gpus: tuple[int, ...] | None = None
    tp: int = 1
    ep: int = 1
    threads: int = 1
    max_running_requests: int | None = None
    prefix_cache: bool = True
    seed: int = 0
    version: int = 0
    host: str = "127.0.0.1"
    token: str | None = field(default=None, repr=False)
    python: str | None = None
    log_path: str | Path | None = None
    sync_folder: str | Path | None = None
    start_timeout: float = 180.0
    request_timeout: float = 600.0

    def __post_init__(self) -> None:
        faults = []
        if self.engine not in commands.ENGINES:
            faults.append(f"engine {self.engine!r}; {hint(self.engine, commands.ENGINES)}")
        if self.tp % self.ep:
            faults.append(f"ep {self.ep} does not divide tp {self.tp}")
        if self.engine == "local" and self.tp != 1:
            faults.append(f"the local engine has one rank, not tp {self.tp}; use engine: sglang")
        if self.gpus is not None and len(set(self.gpus)) != self.tp:
            faults.append(f"gpus {self.gpus} are not one for each of tp {self.tp} ranks")
        if self.gpus is not None and self.device == "cpu":
            faults.append(f"gpus {self.gpus} of a server on the CPU")
        if self.engine == "local" and self.device != "cpu":
            faults.append("the local engine runs on the CPU; use engine: sglang on a GPU")
        if self.token is None and not commands.is_loopback(self.host):
            faults.append(f"host {self.host} is open to the network and needs a token")
        if not (Path(self.model_path) / "config.json").is_file():
            faults.append(f"model_path {self.model_path} has no config.json")
        if self.sync_folder is not None and not Path(self.sync_folder).is_dir():
            faults.append(f"sync_folder {self.sync_folder} is no folder")
        if faults:
            raise ValueError("rollout server: " + "; ".join(faults) + ".")


class Server:
    """A running server. `url` and `pid` (its supervisor's); always `stop` it."""

    def __init__(self, config: ServerConfig, port: int) -> None:
        self.config = config
        self.folder = owned.make(Path(tempfile.gettempdir()), FOLDERS)
        self.log_path = Path(config.log_path or self.folder / "server.log")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.port = port
        command, environment = commands.build(config, port, self.folder)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-S", supervise.__file__, str(os.getpid()), *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The supervisor's process id; its death ends the server."""
        return self._process.pid

    @property
    def url(self) -> str:
        """Where the server answers."""
        return f"http://{self.config.host}:{self.port}"

    def client(self, timeout: float | None = None) -> RolloutClient:
        """A client of this server; `timeout` defaults to the config's request_timeout."""
        config = self.config
        model = json.loads((Path(config.model_path) / "config.json").read_text())
        deadline = timeout or config.request_timeout
        return RolloutClient(self.url, config.token, deadline, model["vocab_size"])

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def check(self) -> None:
        """ServerDied, with the log's tail, when the process has ended."""
        status = self._process.poll()
        if status is not None:
            raise ServerDied(
                f"the {self.config.engine} rollout server at {self.url} ended with status {status}",
                self.log_path,
                self.log_tail(),
            )

    def check_soon(self, seconds: float = 3.0) -> None:
        """As `check`, giving a process that may be ending `seconds` to do so."""
        deadline = time.monotonic() + seconds
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.check()

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines that this server wrote."""
        if not self.log_path.is_file():
            return "(the log is gone)"
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def wait_until_healthy(self) -> None:
        """Wait for /health. ServerDied or RolloutTimeout, each with the log's tail."""
        deadline = time.monotonic() + self.config.start_timeout
        client = self.client()
        try:
            while not (self._find_port() and client.health()):
                self.check()
                if time.monotonic() > deadline:
                    raise RolloutTimeout(
                        f"the {self.config.engine} rollout server was not healthy within "
                        f"{self.config.start_timeout:.0f} s (roles.rollout.start_timeout_seconds). "
                        f"The end of {self.log_path}:\n{self.log_tail()}"
                    )
                time.sleep(0.1)
                client.url = self.url
        finally:
            client.close()

    def stop(self) -> None:
        """End the server and every process of its own; safe to call again."""
        if self.alive():
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        owned.remove(self.folder)

    def _find_port(self) -> bool:
        """Whether the port is known: the local engine binds any free one and writes it down."""
        written = self.folder / commands.PORT_FILE
        if self.port == 0 and written.is_file():
            self.port = int(written.read_text())
        return self.port != 0


def start_server(config: ServerConfig) -> Server:
    """Start a server and wait until it is healthy; it ends with this process.

    ValueError for a config that cannot work; ServerDied or RolloutTimeout with the log's tail.
    """
    _refuse_what_cannot_run(config)
    for attempt in range(_PORT_TRIES):
        server = Server(config, 0 if config.engine == "local" else _free_port(config.host))
        try:
            server.wait_until_healthy()
        except ServerDied as error:
            server.stop()
            if _PORT_TAKEN in str(error).lower() and attempt + 1 < _PORT_TRIES:
                continue  # another process took the port between the choice and the bind
            raise
        except BaseException:
            server.stop()
            raise
        return server
    raise AssertionError("the last try returns or raises")


def _refuse_what_cannot_run(config: ServerConfig) -> None:
    """ValueError for models that SGLang, or its operators for the CPU, load but cannot run."""
    if config.engine != "sglang":
        return
    model = json.loads((Path(config.model_path) / "config.json").read_text())
    name = (model.get("architectures") or ["none"])[0]
    if name in NEVER_TIED and model.get("tie_word_embeddings"):
        raise ValueError(
            f"rollout server: SGLang never ties {name}'s output layer to its embedding, as "
            f"tie_word_embeddings of {config.model_path} says; sample with the local engine, or "
            "from a checkpoint that holds lm_head.weight."
        )
    if config.device != "cpu":
        return
    faults = []
    if name in GPU_ONLY:
        faults.append(f"{name} of {config.model_path}; sample from another model, or on a GPU")
    if config.ep > 1:
        faults.append(
            f"experts that are spread over ranks (ep {config.ep}); set roles.rollout.parallel.ep "
            "to 1, or sample on a GPU"
        )
    if faults:
        raise ValueError(f"rollout server: SGLang on a CPU cannot run {'; nor '.join(faults)}.")


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
