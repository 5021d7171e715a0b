"""`hybridflow train RECIPE [key=value ...]`: run a recipe."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridflow.dataflow.launch import LaunchOptions
    from hybridflow.recipe.plan import Plan

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""The environment variable by which torchrun marks the processes that it starts."""
CHECKED, ENDED = "checked", "ended"
REPORT_SECONDS = 20.0


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command's arguments."""
    parser = subparsers.add_parser("train", help="run a recipe")
    parser.add_argument("recipe", help="recipe YAML")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="e.g. output=runs/try"
    )
    going_on = parser.add_mutually_exclusive_group()
    going_on.add_argument(
        "--resume", action="store_true", help="go on from the run folder's last checkpoint"
    )
    going_on.add_argument(
        "--resume-if-any",
        action="store_true",
        help="go on where the run folder holds a checkpoint, else start: for jobs that are "
        "restarted with one command",
    )
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="join this Ray cluster instead of starting one"
    )
    parser.add_argument(
        "--plain", action="store_true", help="one line per step instead of the live view"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Check, then train. Exit codes: 0, 1 (the run failed), 2 (the recipe), 130, 143, 129."""
    if TORCHRUN in os.environ and args.address is None:
        return _run_rank(args)
    plan = _plan(args)

    from hybridflow.cluster import RaySession
    from hybridflow.dataflow.launch import train

    cluster = plan.recipe.cluster

    def open_session(logs: Path) -> RaySession:
        return RaySession(
            cluster.nodes, cluster.devices_per_node, address=args.address, log_dir=logs
        )

    return _guarded(lambda: train(plan, open_session, _options(args)))


def _run_rank(args: argparse.Namespace) -> int:
    """The same on one rank of torchrun; the others wait until rank 0 has found no fault."""
    from hybridflow.cluster import RanksStore
    from hybridflow.dataflow.launch_ranks import check_plan, train_on_ranks

    store = RanksStore()
    if store.rank != 0:
        store.hear(CHECKED)
    plan = _plan(args)
    check_plan(plan, store.world)
    if store.rank == 0:
        store.tell(CHECKED, "")
    status = _guarded(lambda: train_on_ranks(plan, store, _options(args)))
    if status:  # a thread may hang in a collective whose other ranks are gone
        if store.rank == 0:
            store.tell(ENDED, "")
        elif status == 1:  # torchrun ends all ranks with the first: let rank 0 write its report
            store.await_said(ENDED, REPORT_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _plan(args: argparse.Namespace) -> "Plan":
    from hybridflow.recipe.checks import check
    from hybridflow.recipe.compile import compile_recipe
    from hybridflow.recipe.faults import RecipeError
    from hybridflow.recipe.load import load_recipe

    recipe = load_recipe(args.recipe, args.overrides)
    if faults := check(recipe):
        raise RecipeError(faults)
    return compile_recipe(recipe)


def _options(args: argparse.Namespace) -> "LaunchOptions":
    from hybridflow.dataflow.launch import LaunchOptions

    resume = "if any" if args.resume_if_any else args.resume
    return LaunchOptions(resume=resume, live=False if args.plain else None)


def _guarded(train: Callable[[], object]) -> int:
    """Run it; the exit code of how it ended, with one message when it failed."""
    from hybridflow.dataflow.signals import Terminated

    try:
        train()
    except Terminated as signal:
        print(f"hybridflow train: ended by {signal}", file=sys.stderr)  # noqa: T201
        return 128 + signal.number
    except KeyboardInterrupt:
        print("hybridflow train: interrupted", file=sys.stderr)  # noqa: T201
        return 130
    except (RuntimeError, TimeoutError, ConnectionError) as error:
        print(f"hybridflow train: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0
