"""HuggingFace and Megatron checkpoints, read, written and converted, beside `cp` and mbridge.

    .venv/bin/python -m benchmarks.convert

A 2 GB Qwen3 and a 2 GB Qwen3-MoE of random bfloat16 weights: onto a live model at TP1 and at
TP2xPP2, to a Megatron checkpoint and back. The floors are plain safetensors reads and writes and
`cp` of the same files; the peer is mbridge, in ``.venv-mbridge``, made on demand. The sides take
turns, each in processes of its own.

Writes ``benchmarks/results/convert.json``; exits 1 when a target is missed or the machine was not
quiet.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.convert_inputs import CHECKPOINTS, Checkpoint, make, warm
from benchmarks.convert_memory import ROOT
from benchmarks.convert_others import Others
from benchmarks.convert_report import BOUNDED, DIRECTIONS, LAYOUTS, PEER, compare, show
from benchmarks.convert_server import Side
from benchmarks.grpo_sides import installed
from benchmarks.watch import QUIET_CORES

RESULT = ROOT / "benchmarks" / "results" / "convert.json"
ROUNDS, LOADS = 3, 2
MEMORY = 200 * 2**20
"""A tenth of a checkpoint."""
PEER_PACKAGES = (
    "mbridge==0.15.1",
    "transformers==4.57.6",
    "tokenizers==0.22.2",
    "huggingface-hub==0.36.2",
    "einops==0.8.1",
)
PACKAGES = ("torch", "megatron-core", "safetensors", "transformers")
_JOBS = dict(zip(DIRECTIONS, ("to_megatron", "to_huggingface"), strict=True))
_SPACE = 9 * 2**30
_CACHE = (
    "Page cache warm: every file was read or written just before. Live models' memory had been "
    "touched."
)
_SYNC = (
    "Writes count until all files are on the disk: ours syncs by itself, `cp`, save_file and "
    "mbridge are followed by fsync of each file. The disk was idle before each."
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description="checkpoints converted, beside cp and mbridge")
    add = made.add_argument
    add("--checkpoints", nargs="+", choices=CHECKPOINTS, default=list(CHECKPOINTS))
    add("--rounds", type=int, default=ROUNDS, help=f"turns of each side (default {ROUNDS})")
    add("--quick", action="store_true", help="one round, and no commands with their imports")
    add("--no-peer", action="store_true", help="leave mbridge out")
    add("--folder", type=Path, help="where to write, 9 GB (default: the system's for temp files)")
    add("--keep", action="store_true", help="keep the synthetic checkpoints there, for another run")
    add("--output", type=Path, default=RESULT)
    return made


class Bench:
    """Measures what the arguments ask for.

    Args:
        args: of the command line.
        folder: for checkpoints and results.
        logs: for the sides' logs.
    """

    def __init__(self, args: argparse.Namespace, folder: Path, logs: Path, console: Console):
        self._rounds = 1 if args.quick else args.rounds
        self._quick = args.quick
        self._names, self._keep = args.checkpoints, args.keep
        self._folder, self._console = folder, console
        self._now = ""
        self._peer_python = None if args.no_peer else peer_python()
        self._ours = Side(Path(sys.executable), "benchmarks.convert_jobs", logs / "ours.log")
        self._peer = None
        if self._peer_python is not None:
            module = "benchmarks.peers.mbridge_convert"
            self._peer = Side(self._peer_python, module, logs / f"{PEER}.log")

    def stop(self) -> None:
        """End the sides."""
        for side in (self._ours, self._peer):
            if side is not None:
                side.stop()

    def report(self) -> dict[str, Any]:
        """Everything measured, and the verdicts."""
        load = os.getloadavg()[0]
        others = Others()
        measured = {name: self._measure(CHECKPOINTS[name]) for name in self._names}
        cores = others.cores()
        verdicts = [v for found in measured.values() for v in found["verdicts"].values()]
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"cores": os.cpu_count(), "file_system": _file_system(self._folder)},
            "versions": self._versions(),
            "rounds": self._rounds,
            "memory": MEMORY,
            "cache": _CACHE,
            "sync": _SYNC,
            "load_before": load,
            "other_cores": cores,
            "quiet": cores <= QUIET_CORES,
            "met": all(verdict["met"] for verdict in verdicts),
            "checkpoints": measured,
        }

    def _measure(self, checkpoint: Checkpoint) -> dict[str, Any]:
        self._now = checkpoint.name
        source = make(checkpoint, self._folder)
        jobs: dict[str, dict[str, Any]] = {}
        try:
            warm(source)
            for number in range(self._rounds):
                for layout in LAYOUTS:
                    self._load(jobs, source, layout, number)
                self._convert(jobs, source, number)
            self._once(jobs, source)
        finally:
            for name in ("copy", "megatron", "back", f"{PEER}-megatron", f"{PEER}-back"):
                shutil.rmtree(self._folder / name, ignore_errors=True)
            if not self._keep:
                shutil.rmtree(source)
        return {
            "bytes": checkpoint.bytes,
            "tensors": len(checkpoint.shapes()),
            "jobs": jobs,
            "verdicts": compare(jobs, MEMORY),
        }

    def _load(self, jobs: dict[str, Any], source: Path, layout: str, number: int) -> None:
        """Each side in turn, beginning with another in each round."""
        tp, pp = LAYOUTS[layout]
        floors = [(name, self._ours, name) for name in ("read", "slices")]
        sides = [*(floors if tp > 1 else floors[:1]), ("load", self._ours, "load")]
        if self._peer is not None:
            sides.append((f"{PEER} load", self._peer, "load"))
        sums = []
        for name, side, job in _rotated(sides, number):
            given = {"source": source, "tp": tp, "pp": pp, "repeats": LOADS}
            found = self._run(jobs, f"{name} {layout}", side, job, given)
            if job == "load":
                sums.append(found["sums"])
        if any(one != sums[0] for one in sums):
            raise ValueError(f"{source.name} {layout}: the sides loaded different weights")

    def _convert(self, jobs: dict[str, Any], source: Path, number: int) -> None:
        floors = [("cp", "copy"), ("save_file", "write")]
        work = [(self._floor, name, job) for name, job in floors]
        work += [(self._pair, prefix, side) for prefix, side in self._sides()]
        for run, name, what in _rotated(work, number):
            run(jobs, source, name, what)

    def _sides(self) -> list[tuple[str, Any]]:
        ours = [("", self._ours)]
        return ours if self._peer is None else [*ours, (PEER, self._peer)]

    def _floor(self, jobs: dict[str, Any], source: Path, name: str, job: str) -> None:
        given = {"source": source, "destination": self._folder / "copy"}
        self._run(jobs, name, self._ours, job, given)
        shutil.rmtree(self._folder / "copy")

    def _pair(self, jobs: dict[str, Any], source: Path, prefix: str, side: Side) -> None:
        """HF -> Megatron -> HF, which must give the same tensors."""
        dash, blank = (f"{prefix}-", f"{prefix} ") if prefix else ("", "")
        megatron, back = self._folder / f"{dash}megatron", self._folder / f"{dash}back"
        origin = {"origin": source} if prefix else {}
        there, again = DIRECTIONS
        given = {"source": source, "destination": megatron}
        self._run(jobs, blank + there, side, _JOBS[there], given)
        given = {"source": megatron, "destination": back, **origin}
        self._run(jobs, blank + again, side, _JOBS[again], given)
        self._check(source, back)
        shutil.rmtree(back)
        if prefix:
            shutil.rmtree(megatron)

    def _once(self, jobs: dict[str, Any], source: Path) -> None:
        """Both ways under the bound on memory, and as commands."""
        folders = (source, self._folder / "megatron", self._folder / "back")
        for direction, given, made in zip(DIRECTIONS, folders[:2], folders[1:], strict=True):
            if not self._quick:
                arguments = {"source": given, "destination": made}
                self._run(jobs, f"{direction}, command", self._ours, "command", arguments)
        for direction, given, made in zip(DIRECTIONS, folders[:2], folders[1:], strict=True):
            arguments = {"source": given, "destination": made, "memory": MEMORY}
            name = BOUNDED.format(direction=direction)
            self._run(jobs, name, self._ours, _JOBS[direction], arguments)
        self._check(source, folders[2])

    def _check(self, source: Path, back: Path) -> None:
        wrong = self._ours.run("compare", source=source, destination=back)["wrong"]
        if wrong:
            raise ValueError(f"{back.name} differs from {source.name}: {', '.join(wrong[:5])} ...")

    def _run(
        self, jobs: dict[str, Any], name: str, side: Side, job: str, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """One job; its times join those of earlier rounds."""
        found = side.run(job, **arguments)
        kept = jobs.setdefault(name, {"peak_bytes": None})
        for times in ("seconds", "unsynced_seconds", "cpu_seconds"):
            if times in found:
                kept[times] = kept.get(times, []) + found[times]
        peaks = [peak for peak in (kept["peak_bytes"], found["peak_bytes"]) if peak is not None]
        kept["peak_bytes"] = max(peaks, default=None)
        shown = " ".join(f"{seconds:.2f}" for seconds in found["seconds"])
        self._console.print(f"{self._now} {name}: {shown} s", highlight=False)
        return found

    def _versions(self) -> dict[str, dict[str, str]]:
        versions = {"hybridflow": installed(Path(sys.executable), PACKAGES)}
        if self._peer_python is not None:
            versions[PEER] = installed(self._peer_python, [*PACKAGES, "mbridge"])
        return versions


def _rotated(sides: list[Any], number: int) -> list[Any]:
    start = number % len(sides)
    return sides[start:] + sides[:start]


def peer_python() -> Path:
    """The interpreter of mbridge's environment, made on demand: mbridge and the transformers that
    it was written for; torch, megatron-core and safetensors are this project's."""
    folder = ROOT / ".venv-mbridge"
    python, marker = folder / "bin" / "python", folder / "ready"
    if not marker.is_file() or marker.read_text().split() != list(PEER_PACKAGES):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        site = next((folder / "lib").glob("python3*/site-packages"))
        ours = next(Path(sys.prefix, "lib").glob("python3*/site-packages"))
        (site / "hybridflow_environment.pth").write_text(f"{ours}\n")
        install = [str(python), "-m", "pip", "install", "-q", "--no-deps", *PEER_PACKAGES]
        subprocess.run(install, check=True)
        marker.write_text("\n".join(PEER_PACKAGES) + "\n")
    return python


def _file_system(folder: Path) -> str:
    done = subprocess.run(
        ["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _write(report: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".json.new")
    aside.write_text(json.dumps(report, indent=1) + "\n")
    aside.rename(path)


def main() -> int:
    """Runs everything; 0 when every target is met on a quiet machine."""
    options = parser()
    args = options.parse_args()
    if args.rounds < 1:
        options.error("--rounds: at least 1")
    if args.keep and args.folder is None:
        options.error("--keep needs --folder")
    console = Console()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that sides end too
    with tempfile.TemporaryDirectory(prefix="hybridflow-benchmark-") as scratch:
        folder = Path(scratch) if args.folder is None else args.folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < _SPACE:
            options.error(f"{folder} has less than {_SPACE >> 30} GiB free; give another --folder")
        bench = Bench(args, folder, Path(scratch), console)
        try:
            report = bench.report()
        finally:
            bench.stop()
    _write(report, args.output)
    show(console, report)
    return 0 if report["met"] and report["quiet"] else 1


if __name__ == "__main__":
    sys.exit(main())
