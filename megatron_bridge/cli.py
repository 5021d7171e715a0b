"""The bridge's commands: convert, inspect, diff, verify. Building them imports no torch."""

import argparse
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

COMMANDS = ("convert", "inspect", "diff", "verify")
DTYPES = ("float32", "bfloat16", "float16")
_MOST_WORKERS = 8


class Terminated(BaseException):
    """SIGTERM or SIGHUP."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = argparse.ArgumentParser(
        prog="python -m megatron_bridge",
        description="HuggingFace <-> Megatron checkpoints: convert, inspect, compare, prove.",
    )
    add(root.add_subparsers(dest="command", required=True, metavar="COMMAND"))
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 done; 1 failed, or `diff` found a difference or `verify` a fault; 2 the user's mistake;
        130 and 143 when a signal ended it.
    """
    args = parser().parse_args(arguments)
    return args.func(args)


def add(subparsers: Any) -> None:
    """Declare the commands."""
    _add_convert(subparsers)
    _add_inspect(subparsers)
    _add_diff(subparsers)
    _add_verify(subparsers)


def _command(
    subparsers: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    command = subparsers.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    command.set_defaults(func=lambda args: _guarded(run, args, command.prog))
    return command


def _guarded(run: Callable[[argparse.Namespace], int], args: argparse.Namespace, prog: str) -> int:
    """The exit status; every failure is one message on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may hold bytes that are no text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output, `head` say, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, RuntimeError) as error:
        _say(prog, _told(error))
        return 1
    except ValueError as error:
        _say(prog, error)
        return 2
    except Terminated as ended:
        _say(prog, ended)
        return 128 + ended.number
    except KeyboardInterrupt:
        _say(prog, "interrupted")
        return 130


def _told(error: OSError | RuntimeError) -> str:
    """What went wrong; of the system's errors `PATH: No space left on device`, say."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        names = [error.filename, *([error.filename2] if error.filename2 is not None else [])]
        return f"{' -> '.join(map(os.fsdecode, names))}: {error.strerror}"
    return str(error)


def _say(prog: str, message: object) -> None:
    print(f"{prog}: {message}", file=sys.stderr)  # noqa: T201


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))  # noqa: T201


def _add_convert(subparsers: Any) -> None:
    command = _command(
        subparsers,
        "convert",
        _convert,
        "convert a checkpoint between HuggingFace and Megatron, in bounded memory",
    )
    command.add_argument("source", type=Path, metavar="SRC", help="HuggingFace or Megatron folder")
    command.add_argument(
        "destination", type=Path, metavar="DST", help="folder to make: complete or absent"
    )
    command.add_argument(
        "--to",
        choices=("megatron", "huggingface"),
        help="what DST is (default: the other kind than SRC)",
    )
    command.add_argument(
        "--parallel",
        metavar="tp=2,pp=2,...",
        help="cut a Megatron checkpoint for this layout (default: whole tensors; any layout loads "
        "either)",
    )
    command.add_argument(
        "--dtype", choices=DTYPES, help="cast to this (default: each tensor keeps its own)"
    )
    command.add_argument(
        "--memory",
        default="4GiB",
        metavar="SIZE",
        help="most anonymous memory of all processes on a host together (default 4GiB)",
    )
    command.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help=f"processes (default: one a core, at most {_MOST_WORKERS}); under torchrun of each "
        "rank",
    )
    command.add_argument(
        "--shard-size",
        metavar="SIZE",
        help="most bytes of a safetensors file (default 5GB)",
    )
    command.add_argument(
        "--adapter", type=Path, metavar="FOLDER", help="PEFT adapter to merge into SRC"
    )
    command.add_argument(
        "--config",
        type=Path,
        metavar="FOLDER",
        help="HuggingFace folder with the config.json and tokenizer of a Megatron SRC that has "
        "none",
    )
    command.add_argument(
        "--resume", action="store_true", help="continue a conversion that was cut short"
    )
    command.add_argument(
        "--overwrite", action="store_true", help="replace DST when the conversion is done"
    )


def _convert(args: argparse.Namespace) -> int:
    from megatron_bridge.convert.memory import Meter
    from megatron_bridge.convert.request import Request, default_workers, run
    from megatron_bridge.convert.sizes import parse_bytes

    meter = Meter()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP, and means it
            signal.signal(number, _terminate)
    request = Request(
        source=args.source,
        destination=args.destination,
        to=args.to,
        parallel=args.parallel,
        dtype=args.dtype,
        memory=parse_bytes(args.memory),
        workers=default_workers(_MOST_WORKERS) if args.workers is None else args.workers,
        shard_bytes=None if args.shard_size is None else parse_bytes(args.shard_size),
        adapter=args.adapter,
        config=args.config,
        resume=args.resume,
        overwrite=args.overwrite,
    )
    result = run(request, meter)
    if result is None:  # another rank of torchrun tells
        return 0
    if args.json:
        _print_json(result.as_json())
    else:
        print(result.line())  # noqa: T201
    return 0


def _terminate(number: int, _frame: Any) -> None:
    raise Terminated(number)


def _add_inspect(subparsers: Any) -> None:
    command = _command(subparsers, "inspect", _inspect, "say what a checkpoint is")
    command.add_argument(
        "path", type=Path, metavar="PATH", help="HuggingFace, Megatron or adapter folder, or a file"
    )


def _inspect(args: argparse.Namespace) -> int:
    from megatron_bridge.inspection import inspect, table

    found = inspect(args.path)
    if args.json:
        _print_json(found.as_json())
    else:
        print(table(found))  # noqa: T201
    return 0


def _add_diff(subparsers: Any) -> None:
    command = _command(
        subparsers, "diff", _diff, "compare two checkpoints of any kind, tensor by tensor"
    )
    command.add_argument("one", type=Path, metavar="A")
    command.add_argument("other", type=Path, metavar="B")
    command.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="largest difference, relative to the tensor's largest element, that counts as equal "
        "(default 0)",
    )
    command.add_argument(
        "--config",
        type=Path,
        metavar="FOLDER",
        help="HuggingFace folder of the model, for a Megatron checkpoint that has no config.json",
    )


def _diff(args: argparse.Namespace) -> int:
    from megatron_bridge.difference import compare, text

    if not args.tolerance >= 0:
        raise ValueError(f"--tolerance is at least 0, not {args.tolerance}")
    found = compare(args.one, args.other, args.tolerance, args.config)
    if args.json:
        _print_json(found.as_json())
    else:
        print(text(found))  # noqa: T201
    return 0 if found.equal else 1


def _add_verify(subparsers: Any) -> None:
    command = _command(
        subparsers,
        "verify",
        _verify,
        "prove from config.json alone that a layout holds every element once and exports it back",
    )
    command.add_argument("config", type=Path, metavar="CONFIG", help="config.json or its folder")
    command.add_argument(
        "--parallel", required=True, metavar="tp=8,pp=16,ep=64,...", help="the layout"
    )
    command.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="of the parameters, for the bytes of each rank (default bfloat16)",
    )


def _verify(args: argparse.Namespace) -> int:
    from megatron_bridge.layout import ParallelLayout
    from megatron_bridge.proof import prove

    layout = ParallelLayout.parse(args.parallel)
    report = prove(_read_config(args.config), layout, dtype=args.dtype)
    if args.json:
        _print_json(report.to_json())
    else:
        print(report.table())  # noqa: T201
    return 0 if report.ok else 1


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} does not exist; give a config.json or its folder")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no JSON object")
    return config
