"""From the measured jobs of benchmarks/convert.py to ratios, verdicts and tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

LOAD_TARGET = 1.3
"""Of plain safetensors reads."""
CONVERT_TARGET = 1.5
"""Of `cp`."""
PEER_TARGET = 1.0
PEER = "mbridge"
LAYOUTS = {"TP1": (1, 1), "TP2xPP2": (2, 2)}
DIRECTIONS = ("HF -> Megatron", "Megatron -> HF")
BOUNDED = "{direction}, bounded"

Jobs = Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class _Pair:
    """One job that may take so many times as long as another."""

    job: str
    than: str
    target: float


def _pairs() -> list[_Pair]:
    found = []
    for layout, (tp, _) in LAYOUTS.items():
        # Of a cut model the floor is reading each rank's slices; whole tensors shared out among
        # the ranks, with no tensor for two of them, is timed beside it.
        floor = "read" if tp == 1 else "slices"
        found += [
            _Pair(f"load {layout}", f"{floor} {layout}", LOAD_TARGET),
            _Pair(f"load {layout}", f"{PEER} load {layout}", PEER_TARGET),
        ]
    for direction in DIRECTIONS:
        found += [
            _Pair(direction, "cp", CONVERT_TARGET),
            _Pair(direction, f"{PEER} {direction}", PEER_TARGET),
        ]
    return found


def compare(jobs: Jobs, memory: int) -> dict[str, Any]:
    """The verdicts on one checkpoint's jobs: medians, and the peak under the bound."""
    verdicts: dict[str, Any] = {}
    for pair in _pairs():
        if pair.than not in jobs:
            continue
        ratio = _seconds(jobs[pair.job]) / _seconds(jobs[pair.than])
        verdicts[f"{pair.job} / {pair.than}"] = {
            "ratio": ratio,
            "ratio_of_best": min(jobs[pair.job]["seconds"]) / min(jobs[pair.than]["seconds"]),
            "target": pair.target,
            "met": ratio <= pair.target,
        }
    for direction in DIRECTIONS:
        peak = jobs[BOUNDED.format(direction=direction)]["peak_bytes"]
        verdicts[f"{direction}: peak / --memory"] = {
            "ratio": peak / memory,
            "target": 1.0,
            "met": peak <= memory,
        }
    return verdicts


def _seconds(job: Mapping[str, Any]) -> float:
    return median(job["seconds"])


def show(console: Console, report: Mapping[str, Any]) -> None:
    """A table for each checkpoint, the verdicts, and how the machine was."""
    for name, checkpoint in report["checkpoints"].items():
        console.print(_table(name, checkpoint))
        for what, verdict in checkpoint["verdicts"].items():
            word = "met" if verdict["met"] else "MISSED"
            best = verdict.get("ratio_of_best")
            besides = "" if best is None else f" (of the best times {best:.2f})"
            console.print(
                f"{name}, {what}: {verdict['ratio']:.2f}{besides}; "
                f"target {verdict['target']:.2f} {word}",
                highlight=False,
            )
    console.print(f"\n{report['cache']} {report['sync']}")
    others = report["other_cores"]
    state = "quiet" if report["quiet"] else "NOT QUIET: others used the CPU, no figure counts"
    console.print(
        f"load before {report['load_before']:.2f}; others used {others:.2f} cores; machine {state}"
    )


def _table(name: str, checkpoint: Mapping[str, Any]) -> Table:
    table = Table(
        title=f"\n{name}: {checkpoint['bytes'] / 1e9:.2f} GB, {checkpoint['tensors']} tensors",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("job", no_wrap=True)
    for heading in ("median\ns", "best\ns", "median\nGB/s", "not\nsynced s", "CPU\ns", "peak\nMiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for job, found in checkpoint["jobs"].items():
        unsynced, peak = found.get("unsynced_seconds"), found["peak_bytes"]
        table.add_row(
            job,
            f"{_seconds(found):.2f}",
            f"{min(found['seconds']):.2f}",
            f"{checkpoint['bytes'] / 1e9 / _seconds(found):.2f}",
            f"{median(unsynced):.2f}" if unsynced else "",
            f"{median(found['cpu_seconds']):.2f}",
            "" if peak is None else f"{peak / 2**20:.0f}",
        )
    return table
