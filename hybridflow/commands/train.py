"""`hybridflow train RECIPE [key=value ...]`: run a recipe."""

import argparse
import sys
from pathlib import Path


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command's arguments."""
    parser = subparsers.add_parser("train", help="run a recipe")
    parser.add_argument("recipe", help="recipe YAML")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="e.g. output=runs/try"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the run folder's last checkpoint"
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
    from hybridflow.recipe.checks import check
    from hybridflow.recipe.compile import compile_recipe
    from hybridflow.recipe.faults import RecipeError
    from hybridflow.recipe.load import load_recipe

    recipe = load_recipe(args.recipe, args.overrides)
    if faults := check(recipe):
        raise RecipeError(faults)
    plan = compile_recipe(recipe)

    from hybridflow.cluster import RaySession
    from hybridflow.dataflow.launch import LaunchOptions, train
    from hybridflow.dataflow.signals import Terminated

    options = LaunchOptions(resume=args.resume, live=False if args.plain else None)
    cluster = plan.recipe.cluster

    def open_session(logs: Path) -> RaySession:
        return RaySession(
            cluster.nodes, cluster.devices_per_node, address=args.address, log_dir=logs
        )

    try:
        train(plan, open_session, options)
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
