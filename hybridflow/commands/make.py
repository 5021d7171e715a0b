"""`hybridflow make ASSET [FOLDER]`: make the models and prompt files that recipes use."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridflow.recipe.assets import FOLDERS


def add(subparsers: Any) -> None:
    """Register the subcommand and one subcommand of its own for each asset."""
    parser = subparsers.add_parser(
        "make",
        help="make a model or a prompt file to train on",
        description="Make a model or a prompt file to train on; nothing happens when it is whole.",
    )
    assets = parser.add_subparsers(dest="asset", required=True, metavar="ASSET")
    quickstart = _asset(assets, "quickstart", _quickstart, "a tiny Qwen3 and two-digit additions")
    quickstart.add_argument("--seed", type=int, default=0, help="of weights and rows (default 0)")
    _asset(assets, "smollm2", _smollm2, "SmolLM2-135M-Instruct in float32, 538 MB")
    gym = _asset(assets, "reasoning-gym", _reasoning_gym, "prompts from reasoning-gym's tasks")
    gym.add_argument(
        "--task",
        action="append",
        metavar="NAME",
        help="a task's name, or name:setting=value,...; may be given several times "
        "(default: sums of at most three numbers of one digit)",
    )
    gym.add_argument("--rows", type=int, default=1000, help="training rows (default 1000)")
    gym.add_argument("--seed", type=int, default=0, help="of the rows (default 0)")


def _asset(
    subparsers: Any, name: str, make: Callable[[argparse.Namespace], bool], what: str
) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=what, description=f"Make {what}.")
    folder = FOLDERS[name]
    parser.add_argument(
        "folder", nargs="?", type=Path, default=folder, help=f"where (default {folder})"
    )
    parser.set_defaults(func=run, make=make)
    return parser


def run(args: argparse.Namespace) -> int:
    """Make the asset and say whether that was needed; ValueError when it cannot be made."""
    made = args.make(args)
    print(f"{args.folder}: {'made' if made else 'already whole'}")  # noqa: T201
    return 0


def _quickstart(args: argparse.Namespace) -> bool:
    from hybridflow.assets import make_quickstart

    _no_progress_bars()
    return make_quickstart(args.folder, seed=args.seed)


def _smollm2(args: argparse.Namespace) -> bool:
    from hybridflow.assets import make_smollm2

    _no_progress_bars()
    return make_smollm2(args.folder)


def _reasoning_gym(args: argparse.Namespace) -> bool:
    from hybridflow.assets import make_reasoning_gym

    tasks = {"tasks": args.task} if args.task else {}
    return make_reasoning_gym(args.folder, rows=args.rows, seed=args.seed, **tasks)


def _no_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
