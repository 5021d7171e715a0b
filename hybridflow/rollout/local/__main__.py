"""`python -m hybridflow.rollout.local`: serve one model folder."""

from __future__ import annotations

import argparse
import ipaddress
import sys
from pathlib import Path

import torch

from hybridflow.rollout.local.model import Decoder
from hybridflow.rollout.local.scheduler import Scheduler
from hybridflow.rollout.local.server import LocalServer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    """Load the model, bind, write the port to --port-file, serve."""
    arguments = _parse()
    token = arguments.token_file.read_text().strip() if arguments.token_file else None
    if token is None and not _is_loopback(arguments.host):
        sys.exit(f"--host {arguments.host} is open to the network: give --token-file.")
    torch.set_num_threads(arguments.threads)
    model = Decoder(arguments.model_path, _DTYPES[arguments.dtype])
    scheduler = Scheduler(model, arguments.max_running_requests, arguments.weight_version)
    server = LocalServer(arguments.host, arguments.port, scheduler, token)
    if arguments.port_file:
        _write_whole(arguments.port_file, str(server.server_address[1]))
    server.serve_forever(poll_interval=60)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hybridflow.rollout.local")
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--port-file", type=Path, help="where the port is written once bound")
    parser.add_argument("--token-file", type=Path, help="holds the bearer token that callers give")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-running-requests", type=int, default=256)
    parser.add_argument("--weight-version", default="0")
    return parser.parse_args()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _write_whole(path: Path, text: str) -> None:
    aside = path.with_suffix(".part")
    aside.write_text(text)
    aside.rename(path)


if __name__ == "__main__":
    main()
