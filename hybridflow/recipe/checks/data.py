"""Data files: that they exist, hold their columns and have enough rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hybridflow.recipe.assets import how_to_make
from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.checks.files import Found, look
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.names import advice


@dataclass(frozen=True)
class _Use:
    """A file, the key that names it, and the rows that are wanted of it, with the key of those."""

    key: str
    path: str
    rows: int
    rows_key: str


def _uses(context: Context) -> list[_Use]:
    recipe = context.recipe
    data, warm, evaluation = recipe.data, recipe.warm_start, recipe.evaluation
    uses = [_Use("data.train", data.train, data.prompts_per_step, "data.prompts_per_step")]
    if data.eval is not None:
        wanted = evaluation.prompts if evaluation and evaluation.prompts else 1
        uses.append(_Use("data.eval", data.eval, wanted, "evaluation.prompts"))
    if warm is not None:
        key = "warm_start.train" if warm.train else "data.train"
        path = warm.train or data.train
        uses.append(_Use(key, path, warm.prompts_per_step, "warm_start.prompts_per_step"))
    return uses


def file_faults(context: Context) -> Iterator[Fault]:
    """Missing files and columns, broken lines, too few rows."""
    seen: dict[str, Found] = {}
    for use in _uses(context):
        path = Path(use.path).expanduser()
        if not path.exists():
            if use.path not in seen:
                what = f"there is no data file {use.path}"
                fix = f"{how_to_make(use.path, 'make the data')}, or mend the path"
                yield context.fault(use.key, what, fix)
            seen[use.path] = Found()
            continue
        if use.path not in seen:
            data = context.recipe.data
            seen[use.path] = look(path, (data.prompt_column, data.answer_column))
            yield from _content_faults(context, use, seen[use.path])
        found = seen[use.path]
        if found.columns is not None and 0 < found.rows < use.rows:
            what = f"{use.path} has {found.rows} rows, but a step takes {use.rows}"
            if use.rows_key == "evaluation.prompts":
                what = f"{use.path} has {found.rows} rows, but an evaluation takes {use.rows}"
            yield context.fault(use.rows_key, what, f"set {use.rows_key} to at most {found.rows}")


def _content_faults(context: Context, use: _Use, found: Found) -> Iterator[Fault]:
    for line, problem in found.problems:
        where = use.path if line is None else f"{use.path}:{line}"
        yield Fault(where, problem, "mend the file")
    if found.problems and not found.rows:
        return
    if not found.rows:
        yield Fault(use.path, "the file holds no rows", "add rows")
        return
    for name in ("prompt_column", "answer_column"):
        column = getattr(context.recipe.data, name)
        if found.columns is not None and column not in found.columns:
            what = f"{use.path} has no column '{column}'"
            fix = f"{advice(column, found.columns)} Set data.{name}"
            yield context.fault(f"data.{name}", what, fix)


CHECKS = (
    Check(
        (
            *("data.train", "data.eval", "data.prompt_column", "data.answer_column"),
            *("data.prompts_per_step", "evaluation.prompts"),
            *("warm_start.train", "warm_start.prompts_per_step"),
        ),
        file_faults,
    ),
)
