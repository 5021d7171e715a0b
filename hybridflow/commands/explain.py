"""``hybridflow explain``: the graph, the devices and the batch algebra of a recipe."""

import argparse


def add(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("explain", help="print a recipe's graph and batch algebra")
    parser.add_argument("recipe", help="path of the recipe's YAML file")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="dotted overrides"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan; files of model and data need not exist for it."""
    from hybridflow.recipe.compile import compile_recipe
    from hybridflow.recipe.explain import explain
    from hybridflow.recipe.load import load_recipe

    print(explain(compile_recipe(load_recipe(args.recipe, args.overrides))))  # noqa: T201
    return 0
