"""The command line and environment of each engine's server process."""

from __future__ import annotations

import ipaddress
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.rollout.server_side.sync_files import LOADER, SYNC_FOLDER

if TYPE_CHECKING:
    from hybridflow.rollout.launch import ServerConfig

ENGINES = ("local", "sglang")
PORT_FILE = "port"
ROOT = Path(__file__).resolve().parents[2]
SGLANG_PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
_SGLANG_CPU = Path(__file__).resolve().parent / "sglang_cpu"
_SERVER_SIDE = Path(__file__).resolve().parent / "server_side"
_KV_BYTES = 1 << 30
_KV_TOKENS = (8192, 262_144)
_RUNNING_REQUESTS = 256


def build(config: ServerConfig, port: int, folder: Path) -> tuple[list[str], dict[str, str]]:
    """(command, environment) of one server; `folder` is private to it."""
    make = _local if config.engine == "local" else _sglang
    return make(config, port, folder)


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _local(config: ServerConfig, port: int, folder: Path) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "hybridflow.rollout.local"]
    command += ["--model-path", str(Path(config.model_path).resolve()), "--dtype", config.dtype]
    command += ["--host", config.host, "--port", str(port), "--port-file", str(folder / PORT_FILE)]
    command += ["--threads", str(config.threads), "--weight-version", str(config.version)]
    command += ["--max-running-requests", str(_running_requests(config))]
    if config.token is not None:
        command += ["--token-file", str(_secret(folder / "token", config.token))]
    return command, _environment(config, ROOT)


def _sglang(config: ServerConfig, port: int, folder: Path) -> tuple[list[str], dict[str, str]]:
    python = Path(config.python or SGLANG_PYTHON)
    if not python.is_file():
        raise ValueError(
            f"SGLang's interpreter {python} does not exist. Run `make sglang`, or set "
            "roles.rollout.python."
        )
    command = [str(python), "-m", "sglang.launch_server"]
    command += ["--model-path", str(Path(config.model_path).resolve()), "--dtype", config.dtype]
    command += ["--host", config.host, "--port", str(port), "--tp", str(config.tp)]
    command += ["--ep-size", str(config.ep)] if config.ep > 1 else []
    command += ["--weight-version", str(config.version), "--random-seed", str(config.seed)]
    command += ["--max-running-requests", str(_running_requests(config))]
    command += ["--skip-tokenizer-init", "--grammar-backend", "none", "--log-level", "warning"]
    command += [] if config.prefix_cache else ["--disable-radix-cache"]
    command += _sglang_cpu(config) if config.device == "cpu" else _sglang_gpu()
    if config.token is not None:
        content = json.dumps({"api-key": config.token})
        command += ["--config", str(_secret(folder / "secret.yaml", content))]
    if config.sync_folder is not None:
        command += ["--custom-weight-loader", LOADER]
    on_path = [_SGLANG_CPU] if config.device == "cpu" else []
    environment = _environment(config, *on_path, _SERVER_SIDE)
    if config.device == "cpu" and config.tp > 1:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = _cores_per_rank(config)
    return command, environment


def _sglang_cpu(config: ServerConfig) -> list[str]:
    return [
        *("--device", "cpu", "--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch", "--disable-overlap-schedule"),
        *("--mem-fraction-static", "0.3", "--max-total-tokens", str(_kv_tokens(config))),
    ]


def _sglang_gpu() -> list[str]:
    """Half of the device's memory, for the trainer may share it."""
    return ["--device", "cuda", "--mem-fraction-static", "0.5"]


def _kv_tokens(config: ServerConfig) -> int:
    """KV pool size: without one SGLang takes nearly all of the machine's free memory."""
    model = json.loads((Path(config.model_path) / "config.json").read_text())
    heads = model["num_attention_heads"]
    width = (model.get("num_key_value_heads") or heads) * (
        model.get("head_dim") or model["hidden_size"] // heads
    )
    per_token = 2 * model["num_hidden_layers"] * width * (4 if config.dtype == "float32" else 2)
    return min(max(_KV_BYTES // per_token, _KV_TOKENS[0]), _KV_TOKENS[1])


def _running_requests(config: ServerConfig) -> int:
    return config.max_running_requests or _RUNNING_REQUESTS


def _cores_per_rank(config: ServerConfig) -> str:
    """SGLang's own form: one group of cores per rank, in turn over the cores we may use."""
    cores = sorted(os.sched_getaffinity(0))
    groups = []
    for rank in range(config.tp):
        chosen = [cores[(rank * config.threads + i) % len(cores)] for i in range(config.threads)]
        groups.append(",".join(str(core) for core in sorted(set(chosen))))
    return "|".join(groups)


# A server that rank 0 of a job starts is no rank of it.
_OF_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
)


def _environment(config: ServerConfig, *python_path: Path) -> dict[str, str]:
    dropped = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", SYNC_FOLDER, *_OF_TORCHRUN)
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    environment |= {
        "OMP_NUM_THREADS": str(config.threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",  # a training step is longer than its default of 5 s
    }
    if config.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif config.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, config.gpus))
    if config.sync_folder is not None:
        environment[SYNC_FOLDER] = str(Path(config.sync_folder).resolve())
    environment["PYTHONPATH"] = os.pathsep.join(map(str, python_path))
    return environment


def _secret(path: Path, text: str) -> Path:
    """Write `text` where only this user reads it, so that no command line shows it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return path
