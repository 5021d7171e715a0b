"""A GRPO step on two CPU cores, beside TRL's GRPOTrainer and a floor.

    .venv/bin/python -m benchmarks.grpo_cpu

Each side runs in processes of its own, one after the other, in rounds: this project through its
``train`` command on the shipped recipes, with Ray, actor on two ranks and rollout servers; TRL
in ``.venv-trl``, made on demand, in one process of two threads and in two of one thread. The
quicker of these in the first round is the peer of the others. Same model, prompts, samples,
lengths, dtype, threads, optimizer and reward.

Writes ``benchmarks/results/grpo_cpu.json``; exits 1 when a target is missed or the machine was not
quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.floor import read_config
from benchmarks.grpo_report import PEER, compare, quiet, same_work, show, summary
from benchmarks.grpo_sides import THREADS, Length, Run, installed, run_ours, run_trl, trl_python
from benchmarks.workloads import FOLDERS, ROOT, WORKLOADS, Inputs, Workload, prepare

RESULT = ROOT / "benchmarks" / "results" / "grpo_cpu.json"
ROUNDS = 2
PACKAGES = ("torch", "transformers")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description="a GRPO step on two cores, beside TRL and a floor")
    add = made.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    add("--layouts", nargs="+", choices=["dp2", "tp2"], default=["dp2", "tp2"])
    add("--steps", type=int, help="measured steps of a round; default: the workload's")
    add("--warmup", type=int, help="discarded steps before them, at least 1")
    add("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    add("--servers", type=int, choices=[1, 2], help="rollout servers; default: the workload's")
    add(
        "--peer-ranks",
        type=int,
        nargs="*",
        choices=[1, 2],
        default=[1, 2],
        help="processes of TRL to try in the first round; none: no peer",
    )
    for asset, folder in FOLDERS.items():
        add(f"--{asset}", type=Path, default=ROOT / folder, help=f"its folder (default {folder})")
    add("--output", type=Path, default=RESULT)
    return made


class Bench:
    """Runs what the arguments ask for, and keeps every run's files in a scratch folder."""

    def __init__(self, args: argparse.Namespace, scratch: Path, console: Console) -> None:
        self._args = args
        self._scratch = scratch
        self._console = console
        self._trl = trl_python() if args.peer_ranks else None
        self._rates: list[float] = []

    def report(self) -> dict[str, Any]:
        """Everything measured, and the verdicts."""
        load = os.getloadavg()[0]
        chosen = [self._chosen(WORKLOADS[name]) for name in self._args.workloads]
        measured = [self._measure(workload) for workload in chosen]
        rate = max(self._rates)
        workloads = {
            workload.name: self._judge(workload, inputs, runs, rate)
            for workload, (inputs, runs) in zip(chosen, measured, strict=True)
        }
        every_side = [side for work in workloads.values() for side in work["sides"].values()]
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"cores": os.cpu_count(), "processor": _processor()},
            "threads": THREADS,
            "versions": self._versions(),
            "matmul_flops": rate,
            "load_before": load,
            "quiet": all(quiet(side) for side in every_side),
            "met": all(v["met"] for work in workloads.values() for v in work["verdicts"].values()),
            "workloads": workloads,
        }

    def _chosen(self, workload: Workload) -> Workload:
        """The workload as the command line changes it."""
        told = {name: getattr(self._args, name) for name in ("steps", "warmup", "servers")}
        return replace(workload, **{n: value for n, value in told.items() if value is not None})

    def _measure(self, workload: Workload) -> tuple[Inputs, dict[str, list[Run]]]:
        """The runs of every side, by its name."""
        length = Length(workload.steps, workload.warmup)
        inputs = prepare(workload, vars_of(self._args), self._scratch, length.total)
        runs: dict[str, list[Run]] = {}
        peers = list(self._args.peer_ranks)
        for number in range(self._args.rounds):
            self._rates.append(_matmul_rate())
            for layout in workload.layouts:
                if layout in self._args.layouts:
                    folder = self._folder(workload, layout, number)
                    run = run_ours(workload, inputs, layout, length, folder)
                    runs.setdefault(layout, []).append(run)
                    self._say(workload, layout, run)
            for ranks in peers:
                assert self._trl is not None, "made with the first peer"
                name = f"{PEER} {ranks}x{THREADS // ranks}"
                folder = self._folder(workload, name.replace(" ", "-"), number)
                run = run_trl(workload, inputs, ranks, length, self._trl, folder)
                runs.setdefault(name, []).append(run)
                self._say(workload, name, run)
            if len(peers) > 1:
                peers = [max(peers, key=lambda r: _speed(runs[f"{PEER} {r}x{THREADS // r}"]))]
        return inputs, runs

    def _judge(
        self, workload: Workload, inputs: Inputs, runs: dict[str, list[Run]], rate: float
    ) -> dict[str, Any]:
        same_work(workload, runs)
        config = read_config(inputs.model)
        sides = {name: summary(of_side, config, rate) for name, of_side in runs.items()}
        return {
            "shape": asdict(workload),
            "sides": sides,
            "verdicts": compare(workload, sides),
        }

    def _folder(self, workload: Workload, side: str, number: int) -> Path:
        folder = self._scratch / workload.name / f"{side}-{number}"
        folder.mkdir()
        return folder

    def _say(self, workload: Workload, side: str, run: Run) -> None:
        seconds = median(step.seconds for step in run.steps)
        self._console.print(
            f"{workload.name} {side}: {seconds:.3f} s a step, {_speed([run]):.0f} tokens/s; "
            f"others used {run.other_cores():.2f} cores"
        )

    def _versions(self) -> dict[str, dict[str, str]]:
        ours = installed(Path(sys.executable), [*PACKAGES, "megatron-core", "ray"])
        peer = installed(self._trl, [*PACKAGES, "trl"]) if self._trl else {}
        return {"hybridflow": ours, PEER: peer}


def vars_of(args: argparse.Namespace) -> dict[str, Path]:
    """The asset folders of the command line."""
    return {asset: getattr(args, asset.replace("-", "_")).resolve() for asset in FOLDERS}


def _speed(runs: Sequence[Run]) -> float:
    return median(step.tokens / step.seconds for run in runs for step in run.steps)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def _matmul_rate() -> float:
    """Measured in a process of its own, so that this one starts no thread pool."""
    code = f"from benchmarks.floor import matmul_rate; print(matmul_rate({THREADS}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": str(THREADS)},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def _write(report: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".json.new")
    aside.write_text(json.dumps(report, indent=1) + "\n")
    aside.rename(path)


def main() -> int:
    """Runs everything; 0 when every target is met on a quiet machine."""
    options = parser()
    args = options.parse_args()
    if args.warmup is not None and args.warmup < 1:
        options.error("--warmup: at least 1, for a step is timed from the end of the one before")
    console = Console()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that sides end too
    with tempfile.TemporaryDirectory(prefix="hybridflow-benchmark-") as scratch:
        report = Bench(args, Path(scratch), console).report()
    _write(report, args.output)
    show(console, report)
    return 0 if report["met"] and report["quiet"] else 1


if __name__ == "__main__":
    sys.exit(main())
