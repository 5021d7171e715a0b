"""Data files: that they exist, hold their columns and have enough rows; masks of conversations."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridflow.recipe.assets import how_to_make
from hybridflow.recipe.axes import Axis
from hybridflow.recipe.catalogue import GRAPH_INPUTS, REWARDS, column_keys, signature
from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.checks.files import Found, look
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.graph import Graph
from hybridflow.recipe.names import advice
from hybridflow.recipe.signature import RoleKind


@dataclass(frozen=True)
class _Use:
    """A file, the key that names it, and the rows that are wanted of it, with the key of those.

    ``columns`` are keys of the data section that name the columns it must have.
    """

    key: str
    path: str
    rows: int
    rows_key: str
    columns: tuple[str, ...]


def _uses(context: Context) -> list[_Use]:
    recipe = context.recipe
    data, warm, evaluation = recipe.data, recipe.warm_start, recipe.evaluation
    columns = _columns(context, "main", "train")
    key = "data.prompts_per_step"
    uses = [_Use("data.train", data.train, data.prompts_per_step, key, columns)]
    if data.eval is not None:
        wanted = evaluation.prompts if evaluation and evaluation.prompts else 1
        columns = _columns(context, "main", "eval")
        uses.append(_Use("data.eval", data.eval, wanted, "evaluation.prompts", columns))
    if warm is not None:
        key = "warm_start.train" if warm.train else "data.train"
        path, rows_key = warm.train or data.train, "warm_start.prompts_per_step"
        columns = _columns(context, "warm_start", "train")
        uses.append(_Use(key, path, warm.prompts_per_step, rows_key, columns))
    return uses


def _columns(context: Context, stage: str, batch: str) -> tuple[str, ...]:
    """What the inputs of a stage's graph (of held-out rows: any stage's) are made of; nothing
    where it could not be read."""
    inputs = [
        name
        for one in context.stages
        for name in one.graph.inputs
        if name in GRAPH_INPUTS
        and GRAPH_INPUTS[name].batch == batch
        and (one.name == stage or batch == "eval")
    ]
    keys = column_keys(inputs, context.recipe.data.messages_column is not None)
    by_source = context.recipe.data.source_column is not None
    return (*keys, "source_column") if by_source and "answers" in inputs else keys


def file_faults(context: Context) -> Iterator[Fault]:
    """Missing files and columns, broken lines, too few rows."""
    seen: dict[str, Found] = {}
    uses = _uses(context)
    for use in uses:
        path = Path(use.path).expanduser()
        if not path.exists():
            if use.path not in seen:
                what = f"there is no data file {use.path}"
                fix = f"{how_to_make(use.path, 'make the data')}, or mend the path"
                yield context.fault(use.key, what, fix)
            seen[use.path] = Found()
            continue
        if use.path not in seen:
            keys = {key: None for other in uses if other.path == use.path for key in other.columns}
            seen[use.path] = look(path, [getattr(context.recipe.data, key) for key in keys])
            yield from _content_faults(context, use, seen[use.path])
        yield from _column_faults(context, use, seen[use.path])
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


def _column_faults(context: Context, use: _Use, found: Found) -> Iterator[Fault]:
    if not found.rows:
        return
    for name in use.columns:
        column = getattr(context.recipe.data, name)
        if found.columns is not None and column not in found.columns:
            what = f"{use.path} has no column '{column}'"
            fix = f"{advice(column, sorted(found.columns))} Set data.{name}"
            yield context.fault(f"data.{name}", what, fix)


def metadata_faults(context: Context) -> Iterator[Fault]:
    """Rows without the column by which reasoning-gym scores."""
    recipe = context.recipe
    parts = [part for s in recipe.roles.rewards().values() for _, part in s.parts("").values()]
    if all(REWARDS.canonical(part.function) != "reasoning_gym" for part in parts):
        return
    for key, path in (("data.train", recipe.data.train), ("data.eval", recipe.data.eval)):
        if path is None or not Path(path).expanduser().exists():
            continue
        found = look(Path(path).expanduser(), ())
        if found.columns and "metadata" not in found.columns:
            what = f"{path} has no column 'metadata', by which the reward reasoning_gym scores"
            fix = "take the rows of `hybridflow make reasoning-gym`, or another reward"
            yield context.fault(key, what, fix)


def mask_faults(context: Context) -> Iterator[Fault]:
    """Nodes that would take what others say in a conversation as the assistant's words."""
    data = context.recipe.data
    if data.messages_column is None or data.turns == "last":
        return  # a last turn is the assistant's from the first token to the last
    kinds = context.recipe.roles.kinds()
    for stage in context.stages:
        if not stage.graph.cycle():
            yield from _unmasked(stage.graph, kinds)


def _unmasked(graph: Graph, kinds: Mapping[str, RoleKind]) -> Iterator[Fault]:
    """Nodes that read conversations' answers, or what is made of them, without their mask."""
    made = {name for name in graph.inputs if name in ("targets", "eval_targets")}
    for node in graph.order:
        told = sorted(made.intersection(node.inputs.values()))
        known = signature(kinds.get(node.role) if node.role else None, node.call or node.function)
        if known is None or not told:
            continue
        tokens = {name for name, kind in known.outputs.items() if kind.axis is Axis.TOKENS}
        made |= {field for output, field in node.outputs.items() if output in tokens}
        masks = "response_mask" in known.inputs
        if "response_mask" in node.inputs or not (masks or node.call == "update"):
            continue
        what = (
            f"node '{node.name}' takes '{told[0]}' of whole conversations, in which others speak, "
            "too, as words of the assistant"
        )
        mask = "eval_target_mask" if told[0].startswith("eval_") else "target_mask"
        fix = f"add `{{response_mask: {mask}}}` to its inputs, or " if masks else ""
        yield Fault(node.origin, what, f"{fix}set data.turns to last")


CHECKS = (
    Check(
        (
            *("data", "evaluation.prompts", "dataflow", "warm_start.dataflow"),
            *("warm_start.train", "warm_start.prompts_per_step"),
        ),
        file_faults,
    ),
    Check(("roles", "data"), metadata_faults),
    Check(("dataflow", "warm_start.dataflow", "roles.*", "data"), mask_faults),
)
