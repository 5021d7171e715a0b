"""The two sides of benchmarks/grpo_cpu.py: this project's `train` command, and TRL's trainer."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.watch import Watched, run_watched
from benchmarks.workloads import LAYOUTS, ROOT, Inputs, Workload

THREADS = 2
BETAS, CLIP_GRAD, CLIP = (0.9, 0.999), 1.0, 0.2
RUN_SECONDS = 1500.0
TRL_PACKAGES = ("torch==2.13.0", "trl==1.16.*")


@dataclass(frozen=True)
class Step:
    """One measured step.

    Attributes:
        seconds: from the end of the step before to its own: records and logs count.
        ended_at: time of the clock.
        nodes: seconds of parts of the step; ``generate`` is among them.
        prompt_lengths: tokens of each of the P prompts.
        lengths: tokens of each of the P x G responses.
        prompts: digest of the prompts' token ids.
    """

    seconds: float
    ended_at: float
    nodes: dict[str, float]
    prompt_lengths: list[int]
    lengths: list[int]
    prompts: str

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Run:
    """One side's steps of one round, and the machine while they ran."""

    steps: list[Step]
    watched: Watched

    def other_cores(self) -> float:
        """Mean cores that other processes used during the measured steps."""
        first = self.steps[0]
        return self.watched.other_cores(first.ended_at - first.seconds, self.steps[-1].ended_at)


@dataclass(frozen=True)
class Length:
    """Steps of one run."""

    steps: int
    warmup: int

    @property
    def total(self) -> int:
        """Measured and discarded steps."""
        return self.steps + self.warmup


# ---- this project -------------------------------------------------------------------------------


def run_ours(workload: Workload, inputs: Inputs, layout: str, length: Length, folder: Path) -> Run:
    """The product's own command on the shipped recipe: Ray, actor on two ranks of one thread,
    rollout servers that share as many threads."""
    command = [sys.executable, "-m", "hybridflow.cli", "train", workload.recipe, "--plain"]
    command += overrides(workload, inputs, layout, length, folder / "run")
    watched = run_watched(
        command, cwd=ROOT, environment={}, log=folder / "run.log", timeout=RUN_SECONDS
    )
    return Run(_our_steps(workload, inputs, folder / "run", length), watched)


def overrides(
    workload: Workload, inputs: Inputs, layout: str, length: Length, output: Path
) -> list[str]:
    """What the benchmark changes in the recipe."""
    reward = ROOT / "benchmarks" / "scoring.py"
    servers = workload.servers
    values: dict[str, Any] = {
        "output": str(output),
        "model.path": str(inputs.model),
        "cluster.devices_per_node": THREADS + servers,
        "data.train": str(inputs.prompts),
        "data.eval": None,
        "data.shuffle": False,
        "data.prompts_per_step": workload.prompts,
        "data.samples_per_prompt": workload.samples,
        "steps": length.total,
        "warm_start": None,
        "evaluation": None,
        "checkpoint": {},
        "export": False,
        "roles.actor.parallel": LAYOUTS[layout],
        "roles.actor.optimizer": {
            "lr": workload.learning_rate,
            "betas": list(BETAS),
            "clip_grad": CLIP_GRAD,
        },
        "roles.rollout.parallel": {"dp": servers},
        "roles.rollout.threads": THREADS // servers,
        "roles.rollout.sampling": {"temperature": 1.0, "max_tokens": workload.max_tokens},
        "roles.reward": {"function": f"{reward}:share_of_digits"},
        "algorithm": {"clip": CLIP},
    }
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _our_steps(workload: Workload, inputs: Inputs, run: Path, length: Length) -> list[Step]:
    """Steps from the run's records, after the warm-up (one step at least)."""
    rows = _jsonl(run / "metrics.jsonl")
    assert len(rows) == length.total, f"{run} has {len(rows)} steps, not {length.total}"
    prompts = _our_prompts(workload, inputs)
    rollouts = {
        step: [row["length"] for row in group]
        for step, group in groupby(_jsonl(run / "rollouts.jsonl"), key=lambda row: row["step"])
    }
    steps = []
    for index in range(length.warmup, length.total):
        row, first = rows[index], index * workload.prompts
        of_step = prompts[first : first + workload.prompts]
        steps.append(
            Step(
                seconds=row["time"] - rows[index - 1]["time"],
                ended_at=row["time"],
                nodes=row["node_seconds"],
                prompt_lengths=[len(ids) for ids in of_step],
                lengths=rollouts[row["step"]],
                prompts=hashlib.sha256(json.dumps(of_step).encode()).hexdigest(),
            )
        )
    return steps


def _our_prompts(workload: Workload, inputs: Inputs) -> list[list[int]]:
    """Token ids of the file's prompts, as the trainer draws them."""
    from transformers import AutoTokenizer

    from hybridflow.data import load_dataset
    from hybridflow.recipe.load import load_recipe

    recipe = load_recipe(ROOT / workload.recipe)
    tokenizer = AutoTokenizer.from_pretrained(inputs.model, local_files_only=True)
    dataset = load_dataset(recipe.data, tokenizer, inputs.prompts)
    return [list(dataset.row(index).prompt_ids) for index in range(len(dataset))]


def _jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- TRL ----------------------------------------------------------------------------------------


def run_trl(
    workload: Workload, inputs: Inputs, ranks: int, length: Length, python: Path, folder: Path
) -> Run:
    """TRL on the same steps: ``ranks`` processes that share the same number of threads."""
    spec = {
        "model": str(inputs.model),
        "prompts_file": str(inputs.prompts),
        "chat": workload.chat,
        "prompts": workload.prompts,
        "samples": workload.samples,
        "max_tokens": workload.max_tokens,
        "learning_rate": workload.learning_rate,
        "betas": BETAS,
        "clip_grad": CLIP_GRAD,
        "clip": CLIP,
        "ranks": ranks,
        "threads": THREADS,
        **asdict(length),
    }
    (folder / "spec.json").write_text(json.dumps(spec, indent=2))
    result = folder / "result.json"
    command = [str(python), "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command += ["benchmarks.peers.trl_grpo", str(folder / "spec.json"), str(result)]
    threads = str(THREADS // ranks)
    environment = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    watched = run_watched(
        command, cwd=ROOT, environment=environment, log=folder / "run.log", timeout=RUN_SECONDS
    )
    return Run([Step(**step) for step in json.loads(result.read_text())["steps"]], watched)


def trl_python() -> Path:
    """The interpreter of TRL's environment, ``.venv-trl``, made on demand."""
    folder = ROOT / ".venv-trl"
    python, marker = folder / "bin" / "python", folder / "ready"
    if not marker.is_file() or marker.read_text().split() != list(TRL_PACKAGES):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for package in TRL_PACKAGES:  # torch first, so that its version is not TRL's choice
            subprocess.run([*pip, package], check=True)
        marker.write_text("\n".join(TRL_PACKAGES) + "\n")
    return python


def installed(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """Versions of packages in an interpreter's environment."""
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    done = subprocess.run(
        [str(python), "-c", code, *packages], capture_output=True, text=True, check=True
    )
    return dict(zip(packages, done.stdout.split(), strict=True))
