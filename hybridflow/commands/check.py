"""``hybridflow check``: every fault of a recipe, before anything starts."""

import argparse
import sys


def add(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("check", help="report every fault of a recipe; starts nothing")
    parser.add_argument("recipe", help="path of the recipe's YAML file")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="dotted overrides"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """0 when the recipe can run, 2 with one line per fault otherwise."""
    from hybridflow.recipe.checks import check_file
    from hybridflow.recipe.compile import compile_recipe

    recipe, faults = check_file(args.recipe, args.overrides)
    if faults or recipe is None:
        for fault in faults:
            print(fault, file=sys.stderr)  # noqa: T201
        count = f"{len(faults)} fault{'s' if len(faults) != 1 else ''}"
        print(f"{args.recipe}: {count}", file=sys.stderr)  # noqa: T201
        return 2
    plan = compile_recipe(recipe)
    stages = " and ".join(f"{stage.steps} steps of {stage.name}" for stage in plan.stages)
    print(f"{args.recipe}: ok, {stages} on {plan.devices} device(s)")  # noqa: T201
    return 0
