"""The folder of the run: that it can be made, and that it is nobody else's."""

from collections.abc import Iterator
from pathlib import Path

from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.output import output_problem


def output_faults(context: Context) -> Iterator[Fault]:
    """A file in the way, a folder that holds other things, or one that cannot be written."""
    problem = output_problem(Path(context.recipe.folder))
    if problem is not None:
        yield context.fault("output" if context.recipe.output else "name", *problem)


CHECKS = (Check(("output", "name"), output_faults),)
