"""From the publications of benchmarks/weight_sync.py to ratios, verdicts and tables."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

BYTES_TARGET = 1.02
"""Of the lower bound."""
COPY_TARGET = 4.0
"""Of one memcpy."""
MEMORY_TARGET = 1.0
"""Of what the mode states, with its buffers for moving elements."""
STANDBY, BUCKETED = "direct, standby", "direct, bucketed"
STEPS = ("send", "prove", "load", "verify", "paused", "total")


def verdicts(
    ways: Mapping[str, Any], lower_bound: int, copies: Sequence[float]
) -> dict[str, dict[str, Any]]:
    """Of one model."""
    found: dict[str, dict[str, Any]] = {}

    def judge(what: str, ratio: float, target: float) -> None:
        found[what] = {"ratio": ratio, "target": target, "met": ratio <= target}

    for name in (STANDBY, BUCKETED):
        if name in ways:
            way = ways[name]
            judge(f"{name}: bytes / lower bound", way["bytes"] / lower_bound, BYTES_TARGET)
            stated = way["stated"] + way["staging"]
            judge(f"{name}: peak / stated", way["peak"]["total"] / stated, MEMORY_TARGET)
    if STANDBY in ways:
        copy, timed = median(copies), ways[STANDBY]["timed"]
        judge(f"{STANDBY}: load / memcpy", _median(timed, "load") / copy, COPY_TARGET)
        unproven = median(each["paused"] - each["verify"] for each in timed)
        judge(f"{STANDBY}: paused without its proof / memcpy", unproven / copy, COPY_TARGET)
    return found


def _median(timed: Sequence[Mapping[str, float]], step: str) -> float:
    return median(each[step] for each in timed)


def show(console: Console, report: Mapping[str, Any]) -> None:
    """A table for each model, the verdicts, and how the machine was."""
    for name, model in report["models"].items():
        console.print(_table(name, model))
        for what, verdict in model["verdicts"].items():
            word = "met" if verdict["met"] else "MISSED"
            console.print(
                f"{name}, {what}: {verdict['ratio']:.3f}; target {verdict['target']:.2f} {word}",
                highlight=False,
            )
    others = report["other_cores"]
    state = "quiet" if report["quiet"] else "NOT QUIET: others used the CPU, no time counts"
    console.print(
        f"load before {report['load_before']:.2f}; others used {others:.2f} cores; machine {state}"
    )


def _table(name: str, model: Mapping[str, Any]) -> Table:
    copy = median(model["memcpy"])
    table = Table(
        title=(
            f"\n{name}: {model['bytes'] / 1e6:.0f} MB, lower bound "
            f"{model['lower_bound'] / 1e6:.0f} MB, one memcpy of it {copy:.3f} s"
        ),
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("way", no_wrap=True)
    headings = (*(f"{step}\ns" for step in STEPS), "total /\nmemcpy", "moved\nMB", "of the\nbound")
    memory = ("files\nMB", "trainer\nMB", "worker\nMB", "server\nMB", "peak\nMB", "stated\nMB")
    for heading in (*headings, *memory):
        table.add_column(heading, justify="right", no_wrap=True)
    for way, found in model["ways"].items():
        timed, peak = found["timed"], found["peak"]
        moved = found["bytes"] + found["gathered_bytes"]
        sides = peak["sides"]
        sizes = (peak["files"], *(sides[s] for s in ("trainer", "worker", "server")), peak["total"])
        table.add_row(
            way,
            *(f"{_median(timed, step):.3f}" if step in timed[0] else "" for step in STEPS),
            f"{_median(timed, 'total') / copy:.1f}",
            f"{moved / 1e6:.0f}",
            f"{moved / model['lower_bound']:.2f}",
            *(f"{size / 1e6:.0f}" for size in sizes),
            f"{found['stated'] / 1e6:.0f}" if "stated" in found else "",
        )
    return table
