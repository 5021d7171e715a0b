"""`hybridflow data RECIPE`: the samples as the model will see them."""

import argparse
from typing import Any


def add(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "data",
        help="show samples as the model will see them: text, tokens, mask",
        description="Show samples as the model will see them (text, tokens, mask), how many rows "
        "there are, how many are left out, and how long they are.",
    )
    parser.add_argument("recipe", help="recipe YAML")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="e.g. data.chat=false"
    )
    parser.add_argument("--rows", type=int, default=3, help="samples to show (default 3)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print samples of every data file of the recipe; ValueError when something is wrong."""
    from rich.console import Console

    from hybridflow.data.show import show_recipe
    from hybridflow.recipe.load import load_recipe

    if args.rows < 0:
        raise ValueError(f"--rows is at least 0, not {args.rows}")
    show_recipe(load_recipe(args.recipe, args.overrides), args.rows, Console())
    return 0
