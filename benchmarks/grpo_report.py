"""From the steps of both sides to ratios, a verdict and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.floor import step_floor
from benchmarks.grpo_sides import Run, Step
from benchmarks.watch import QUIET_CORES
from benchmarks.workloads import Workload

PEER = "trl"
HEADINGS = [
    "step\ns",
    "gener-\nation s",
    "train-\ning s",
    "tokens\n/s",
    "gener-\nation",
    "train-\ning",
    "mean\nlength",
    "times\nfloor",
    "peak\nGB",
]
"""Tokens per second are of the whole step, of its generation and of all the rest."""


def summary(runs: Sequence[Run], config: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """One side's figures over all its rounds: medians over steps, of seconds and tokens/s."""
    steps = [step for run in runs for step in run.steps]
    floors = [step_floor(dict(config), s.prompt_lengths, s.lengths, rate) for s in steps]
    generation = [step.nodes["generate"] for step in steps]
    training = [step.seconds - step.nodes["generate"] for step in steps]
    names = sorted({name for step in steps for name in step.nodes})
    return {
        "step_seconds": median(step.seconds for step in steps),
        "step_seconds_range": [min(s.seconds for s in steps), max(s.seconds for s in steps)],
        "generation_seconds": median(generation),
        "training_seconds": median(training),
        "node_seconds": {n: median(step.nodes.get(n, 0.0) for step in steps) for n in names},
        "tokens_per_second": median(s.tokens / s.seconds for s in steps),
        "generation_tokens_per_second": _rate(steps, generation),
        "training_tokens_per_second": _rate(steps, training),
        "response_tokens_mean": sum(s.tokens for s in steps) / sum(len(s.lengths) for s in steps),
        "response_tokens": [step.tokens for step in steps],
        "prompt_tokens": [sum(step.prompt_lengths) for step in steps],
        "floor_seconds": median(f.generation + f.training for f in floors),
        "floor_generation_seconds": median(f.generation for f in floors),
        "floor_training_seconds": median(f.training for f in floors),
        "peak_memory_bytes": max(run.watched.peak_bytes for run in runs),
        "load_before": [run.watched.load for run in runs],
        "other_cores": [run.other_cores() for run in runs],
        "rounds": [[_brief(step) for step in run.steps] for run in runs],
    }


def _brief(step: Step) -> dict[str, Any]:
    return {"seconds": step.seconds, "tokens": step.tokens, "nodes": step.nodes}


def _rate(steps: Sequence[Step], seconds: Sequence[float]) -> float:
    return median(step.tokens / taken for step, taken in zip(steps, seconds, strict=True))


def compare(workload: Workload, sides: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Each layout against the quickest peer, with its target."""
    peers = {name: side for name, side in sides.items() if name.startswith(PEER)}
    if not peers:
        return {}
    best = max(peers, key=lambda name: peers[name]["tokens_per_second"])
    verdicts = {}
    for name, side in sides.items():
        if name in peers:
            continue
        ratio = side["tokens_per_second"] / peers[best]["tokens_per_second"]
        target = workload.targets[name]
        verdicts[name] = {
            "ratio": ratio,
            "ratio_generation": _ratio(side, peers[best], "generation_tokens_per_second"),
            "ratio_training": _ratio(side, peers[best], "training_tokens_per_second"),
            "peer": best,
            "target": target,
            "met": ratio >= target,
        }
    return verdicts


def _ratio(side: Mapping[str, Any], peer: Mapping[str, Any], what: str) -> float:
    return side[what] / peer[what]


def same_work(workload: Workload, sides: Mapping[str, Sequence[Run]]) -> None:
    """ValueError when the sides did not take the same prompts and numbers of samples, or lengths
    where these are fixed."""
    digests = {tuple(s.prompts for s in run.steps) for runs in sides.values() for run in runs}
    if len(digests) != 1:
        raise ValueError(f"{workload.name}: the sides did not see the same prompts")
    samples = workload.prompts * workload.samples
    for name, runs in sides.items():
        lengths = [step.lengths for run in runs for step in run.steps]
        if any(len(step) != samples for step in lengths):
            raise ValueError(f"{workload.name}, {name}: a step has not {samples} samples")
        if not workload.ends and any(n != workload.max_tokens for step in lengths for n in step):
            raise ValueError(
                f"{workload.name}, {name}: a response has not {workload.max_tokens} tokens"
            )


def quiet(side: Mapping[str, Any]) -> bool:
    """Whether nobody else used the CPU while the side was measured."""
    return all(cores <= QUIET_CORES for cores in side["other_cores"])


def show(console: Console, report: Mapping[str, Any]) -> None:
    """A table for each workload, the floor and the verdicts."""
    for name, workload in report["workloads"].items():
        console.print(_table(name, workload))
        for layout, verdict in workload["verdicts"].items():
            word = "met" if verdict["met"] else "MISSED"
            console.print(
                f"{name} {layout}: {verdict['ratio']:.2f}x {verdict['peer']} "
                f"(generation {verdict['ratio_generation']:.2f}x, "
                f"training {verdict['ratio_training']:.2f}x); "
                f"target {verdict['target']:.2f}x {word}"
            )
    state = "quiet" if report["quiet"] else "NOT QUIET: others used the CPU, no figure counts"
    console.print(
        f"matmul {report['matmul_flops'] / 1e9:.0f} GFLOP/s on {report['threads']} threads; "
        f"load before {report['load_before']:.2f}; machine {state}"
    )


def _table(name: str, workload: Mapping[str, Any]) -> Table:
    shape = workload["shape"]
    table = Table(
        title=f"{name}: {shape['prompts']} prompts x {shape['samples']} samples x "
        f"{shape['max_tokens']} tokens",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("side", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for side, figures in workload["sides"].items():
        table.add_row(
            side,
            f"{figures['step_seconds']:.3f}",
            f"{figures['generation_seconds']:.3f}",
            f"{figures['training_seconds']:.3f}",
            f"{figures['tokens_per_second']:.0f}",
            f"{figures['generation_tokens_per_second']:.0f}",
            f"{figures['training_tokens_per_second']:.0f}",
            f"{figures['response_tokens_mean']:.1f}",
            f"{figures['step_seconds'] / figures['floor_seconds']:.1f}",
            f"{figures['peak_memory_bytes'] / 1e9:.2f}",
        )
    return table
