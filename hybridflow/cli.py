"""The ``hybridflow`` command: one module per sub-command, each importing its needs when run."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

COMMANDS = ("train", "check", "explain", "data", "report", "make")


def parser() -> argparse.ArgumentParser:
    """The whole command line; building it imports no torch."""
    root = argparse.ArgumentParser(
        prog="hybridflow", description="RL post-training: Megatron trainers, SGLang rollouts."
    )
    root.add_argument("--version", action="version", version=f"hybridflow {version('hybridflow')}")
    subparsers = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"hybridflow.commands.{name}").add(subparsers)
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0 done, 2 the user's mistake (printed as one message), 130 interrupted.
    """
    args = parser().parse_args(arguments)
    try:
        return args.func(args)
    except ValueError as error:
        print(f"hybridflow {args.command}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print(f"hybridflow {args.command}: interrupted", file=sys.stderr)  # noqa: T201
        return 130


if __name__ == "__main__":
    sys.exit(main())
