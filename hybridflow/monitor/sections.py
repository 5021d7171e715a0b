"""The report's parts for one stage: headline numbers, curves, the time of each node."""

import statistics
from collections.abc import Sequence

from hybridflow.monitor.jsonl import Row
from hybridflow.monitor.page import escape
from hybridflow.monitor.series import Series, metric_names, node_names, series_of
from hybridflow.monitor.svg import COLOURS, line_chart, stacked_bars
from hybridflow.monitor.text import duration, number

# title, [(metric, label)]: the charts shown first, in this order
CHARTS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("Reward", (("reward/mean", "train"), ("eval/reward", "evaluation"))),
    ("Cost", (("cost/mean", "train"), ("eval/cost", "evaluation"))),
    ("KL to the reference", (("update/kl", "KL"),)),
    ("Loss", (("update/loss", "loss"), ("eval/loss", "evaluation"))),
    (
        "Chosen over rejected, share",
        (("update/reward_accuracy", "train"), ("eval/reward_accuracy", "evaluation")),
    ),
    ("Response length, tokens", (("length/mean", "mean"), ("length/max", "max"))),
    ("Advantages", (("advantage/abs_mean", "mean size"), ("advantage/zero_share", "share of 0"))),
    ("Gradient norm", (("update/grad_norm", "norm"),)),
    ("Learning rate", (("update/lr", "lr"),)),
    ("Throughput, tokens/s", (("throughput/tokens_per_second", "tokens/s"),)),
    (
        "Clipped tokens, share",
        (("update/clip_fraction_low", "from below"), ("update/clip_fraction_high", "from above")),
    ),
    ("Trainer-rollout gap, max", (("update/rollout_gap_max", "gap"),)),
)
_ENDS = 5  # steps averaged at either end for the headline
_BARS = 48


def headline(rows: Sequence[Row]) -> str:
    """Tiles: reward at both ends, evaluation, KL, throughput, steps, wall time."""
    tiles = []
    reward = series_of(rows, "reward/mean").finite
    if reward:
        ends = f"{_mean(reward[:_ENDS]):.3f} &rarr; {_mean(reward[-_ENDS:]):.3f}"
        tiles.append((ends, f"reward, mean of the first and last {min(_ENDS, len(reward))}"))
    for name, label in (("eval/reward", "evaluation reward, last"), ("update/kl", "KL, last")):
        values = series_of(rows, name).finite
        if values:
            tiles.append((number(values[-1]), label))
    speed = series_of(rows, "throughput/tokens_per_second").finite
    if speed:
        tiles.append((number(statistics.median(speed)), "tokens/s, median"))
    seconds = [float(row["seconds"]) for row in rows if "seconds" in row]
    tiles.append((f"{len(rows):,}", "steps"))
    tiles.append((duration(sum(seconds)), f"wall time, {duration(_median(seconds))} a step"))
    cells = "".join(f'<div class="tile"><b>{b}</b><span>{t}</span></div>' for b, t in tiles)
    return f'<div class="tiles">{cells}</div>'


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def charts(rows: Sequence[Row]) -> str:
    """The known curves, then every other metric folded away."""
    shown = {name for _, lines in CHARTS for name, _ in lines}
    main = [_chart(rows, title, lines) for title, lines in CHARTS]
    others = [name for name in metric_names(rows) if name not in shown]
    rest = [_chart(rows, name, ((name, name.rsplit("/", 1)[-1]),)) for name in others]
    grid = f'<div class="charts">{"".join(main)}</div>'
    if not rest:
        return grid
    summary = f"<summary>{len(rest)} more metrics</summary>"
    return f'{grid}<details>{summary}<div class="charts">{"".join(rest)}</div></details>'


def _chart(rows: Sequence[Row], title: str, lines: Sequence[tuple[str, str]]) -> str:
    """One card with title, legend and curve; empty when no step has the metric."""
    found = [(label, series_of(rows, name)) for name, label in lines]
    found = [(label, series) for label, series in found if series.steps]
    if not found:
        return ""
    legend = "".join(_legend(index, label, line) for index, (label, line) in enumerate(found))
    head = f'<div class="head"><h3>{escape(title)}</h3>{legend}</div>'
    return f'<div class="card">{head}{line_chart(found)}</div>'


def _legend(index: int, label: str, series: Series) -> str:
    last = number(series.values[-1])
    lost = f', <span class="bad">{series.lost:,} not finite</span>' if series.lost else ""
    key = f'<i class="key c{index % COLOURS}"></i>'
    return f'<span class="legend">{key}{escape(label)} {last}{lost}</span>'


def node_times(rows: Sequence[Row]) -> str:
    """Stacked bars of the nodes' seconds over the steps, and a table with their shares."""
    names = node_names(rows)
    if not names:
        return ""
    chart = stacked_bars(names[:COLOURS], _bars(rows, names[:COLOURS]))
    return (
        '<h2>Time per node</h2><div class="wide">'
        f'<div class="card"><div class="head"><h3>Seconds per step</h3></div>{chart}</div>'
        f'<div class="card scroll">{_node_table(rows, names)}</div></div>'
    )


def _bars(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[str, list[float]]]:
    """At most ``_BARS`` bars, each the mean over equal runs of steps."""
    count = min(_BARS, len(rows))
    edges = [round(index * len(rows) / count) for index in range(count + 1)]
    bars = []
    for start, end in zip(edges, edges[1:], strict=False):
        part = rows[start:end]
        means = [_mean([row["node_seconds"].get(name, 0.0) for row in part]) for name in names]
        bars.append((f"{int(part[0]['step']):,}", means))
    return bars


def _node_table(rows: Sequence[Row], names: Sequence[str]) -> str:
    totals = {
        name: sum(float(row["node_seconds"].get(name, 0.0)) for row in rows) for name in names
    }
    whole = sum(totals.values()) or 1.0
    lines = []
    for index, name in enumerate(names):
        calls = sum(name in row["node_seconds"] for row in rows)
        share = totals[name] / whole
        key = f'<i class="key c{index % COLOURS}"></i>' if index < COLOURS else ""
        meter = f'<span class="meter c{index % COLOURS}"><i style="width:{share:.1%}"></i></span>'
        lines.append(
            f"<tr><td>{key}{escape(name)}</td><td>{calls:,}</td>"
            f"<td>{duration(totals[name] / calls)}</td><td>{duration(totals[name])}</td>"
            f"<td>{share:.1%}{meter}</td></tr>"
        )
    head = "<tr><th>Node<th>Runs<th>Mean<th>Total<th>Share</tr>"
    note = (
        '<p class="muted legend">Shares are of the nodes\' summed time; nodes that run at once '
        "overlap, so the sum may exceed the step's wall time.</p>"
    )
    return f"<table>{head}{''.join(lines)}</table>{note}"
