"""The ``hybridflow`` command: modules of sub-commands, each importing its needs when run."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

_MODULES = ("train", "check", "explain", "data", "report", "make", "convert", "plan_sync")
COMMANDS = (*_MODULES[:-1], "plan-sync", "inspect", "diff", "verify")


def parser() -> argparse.ArgumentParser:
    """The whole command line; building it imports no torch."""
    root = argparse.ArgumentParser(
        prog="hybridflow", description="RL post-training: Megatron trainers, SGLang rollouts."
    )
    root.add_argument("--version", action="version", version=f"hybridflow {version('hybridflow')}")
    subparsers = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in _MODULES:
        importlib.import_module(f"hybridflow.commands.{name}").add(subparsers)
    return root


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parsed arguments; ``key=value`` may also stand after an option (argparse takes only those
    before it)."""
    root = parser()
    args, rest = root.parse_known_args(arguments)
    wrong = [word for word in rest if word.startswith("-") or "=" not in word]
    if wrong or (rest and not hasattr(args, "overrides")):
        root.error(f"unrecognized arguments: {' '.join(wrong or rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0 done, 1 failed, 2 the user's mistake (each printed as one message), 130
        interrupted.
    """
    args = parse(arguments)
    try:
        status = args.func(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output, `head` say, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # no space, no permission: the message names the file
        print(f"hybridflow {args.command}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except ValueError as error:
        print(f"hybridflow {args.command}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print(f"hybridflow {args.command}: interrupted", file=sys.stderr)  # noqa: T201
        return 130


if __name__ == "__main__":
    sys.exit(main())
