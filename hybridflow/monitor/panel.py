"""The live panel: progress, metrics, a reward sparkline, and the time of each node."""

import math

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hybridflow.monitor.progress import HEADLINE, Progress
from hybridflow.monitor.text import duration, number

BLOCKS = "▁▂▃▄▅▆▇█"
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
NODE_ROWS = 8


def render(title: str, progress: Progress, width: int) -> RenderableType:
    """The panel for a terminal of ``width`` columns."""
    if not progress.stage:
        return Panel(Text("starting ..."), title=Text(title), border_style="dim")
    parts = [_heading(progress), _metrics(progress)]
    if progress.rewards:
        parts.append(_sparkline(progress, width))
    if progress.node_seconds:
        parts.append(_nodes(progress, bar_width=max(8, min(40, width - 50))))
    return Panel(Group(*parts), title=Text(title), border_style="dim")


def _heading(progress: Progress) -> RenderableType:
    eta = duration(progress.eta) if progress.eta is not None else "unknown"
    row = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=progress.total or 1, completed=progress.step, width=24)
    row.add_row(
        Text(progress.stage, style="bold"),
        Text(f"step {progress.counter}"),
        bar,
        Text(f"elapsed {duration(progress.elapsed)}"),
        Text(f"ETA {eta}"),
    )
    return row


def _metrics(progress: Progress) -> RenderableType:
    text = Text()
    shown = progress.evaluated | progress.metrics
    for label, name in HEADLINE:
        if name in shown:
            text.append(f"{label} ", style="dim")
            text.append(f"{number(shown[name])}   ", style="bold")
    return text


def _sparkline(progress: Progress, width: int) -> RenderableType:
    """The rewards of the latest steps, scaled between the lowest and highest shown."""
    values = [value for value in progress.rewards if math.isfinite(value)][-max(10, width - 30) :]
    if not values:
        return Text("reward  not a number", style="red")
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    bars = "".join(BLOCKS[int((value - low) / span * (len(BLOCKS) - 1))] for value in values)
    return Text.assemble(
        ("reward ", "dim"), (bars, "green"), (f"  {number(low)} to {number(high)}", "dim")
    )


def _nodes(progress: Progress, bar_width: int) -> RenderableType:
    """One bar per node, the slowest first, scaled to the slowest."""
    table = Table.grid(padding=(0, 1))
    ranked = sorted(progress.node_seconds.items(), key=lambda item: -item[1])
    slowest = ranked[0][1] or 1.0
    for index, (name, seconds) in enumerate(ranked[:NODE_ROWS]):
        filled = "█" * max(1, round(seconds / slowest * bar_width))
        bar = Text(filled, style=COLOURS[index % len(COLOURS)])
        table.add_row(Text(name), Text(duration(seconds), justify="right"), bar)
    if len(ranked) > NODE_ROWS:
        rest = sum(seconds for _, seconds in ranked[NODE_ROWS:])
        table.add_row(f"{len(ranked) - NODE_ROWS} more", duration(rest), "")
    return table
