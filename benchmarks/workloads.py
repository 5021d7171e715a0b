"""What benchmarks/grpo_cpu.py runs, and the files that both sides read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYOUTS = {"dp2": {"dp": 2}, "tp2": {"tp": 2}}
"""Ways to cut the actor over two ranks."""

_NEVER = "<never>"


@dataclass(frozen=True)
class Workload:
    """One GRPO step, as both sides take it.

    Attributes:
        recipe: the shipped recipe that it comes from.
        asset, data_asset: what ``hybridflow make`` calls the model and the prompt file.
        prompts, samples: P and G of a step.
        max_tokens: most new tokens of a response.
        ends: whether responses may end before ``max_tokens``.
        targets: least tokens per second over the peer's, by layout.
        servers: rollout servers that share the cores; one reads the weights once a token, two have
            no threads that wait for each other.
        steps, warmup: measured and discarded steps of a round.
    """

    name: str
    recipe: str
    asset: str
    data_asset: str
    prompts: int
    samples: int
    max_tokens: int
    ends: bool
    chat: bool
    learning_rate: float
    servers: int
    steps: int
    warmup: int
    targets: Mapping[str, float] = field(default_factory=dict)

    @property
    def layouts(self) -> list[str]:
        """The layouts that the model allows."""
        return list(self.targets)


TINY = Workload(
    name="tiny",
    recipe="recipes/quickstart.yaml",
    asset="quickstart",
    data_asset="quickstart",
    prompts=16,
    samples=8,
    max_tokens=32,
    ends=False,
    chat=False,
    learning_rate=1e-3,
    servers=2,
    steps=20,
    warmup=5,
    targets={"dp2": 1.0, "tp2": 0.75},
)
SMOLLM2 = Workload(
    name="smollm2",
    recipe="recipes/smollm2_135m_grpo.yaml",
    asset="smollm2",
    data_asset="reasoning-gym",
    prompts=4,
    samples=8,
    max_tokens=96,
    ends=True,
    chat=True,
    learning_rate=5e-6,
    servers=1,
    steps=3,
    warmup=1,
    targets={"dp2": 1.5},  # 9 heads and 3 KV heads: no tp 2
)
WORKLOADS = {workload.name: workload for workload in (TINY, SMOLLM2)}
FOLDERS = {
    "quickstart": Path("assets/quickstart"),
    "smollm2": Path("assets/smollm2-135m"),
    "reasoning-gym": Path("assets/reasoning_gym"),
}


@dataclass(frozen=True)
class Inputs:
    """The files of a workload: a model folder and a JSONL file of prompts and answers."""

    model: Path
    prompts: Path


def prepare(workload: Workload, folders: Mapping[str, Path], scratch: Path, steps: int) -> Inputs:
    """Make what is absent, and cut the prompt file to the rows of ``steps`` steps."""
    for asset in {workload.asset, workload.data_asset}:
        command = [sys.executable, "-m", "hybridflow.cli", "make", asset, str(folders[asset])]
        subprocess.run(command, cwd=ROOT, check=True)
    place = scratch / workload.name
    place.mkdir()
    prompts = place / "prompts.jsonl"
    with (folders[workload.data_asset] / "train.jsonl").open(encoding="utf-8") as source:
        rows = [line for line, _ in zip(source, range(steps * workload.prompts), strict=False)]
    if len(rows) < steps * workload.prompts:
        raise ValueError(
            f"{workload.name}: {steps} steps of {workload.prompts} prompts need more rows than the "
            f"{len(rows)} of {folders[workload.data_asset] / 'train.jsonl'}; take fewer steps"
        )
    prompts.write_text("".join(rows), encoding="utf-8")
    model = folders[workload.asset]
    if not workload.ends:
        model = _without_an_end(model, place / "model")
    return Inputs(model.resolve(), prompts)


def _without_an_end(source: Path, target: Path) -> Path:
    """A copy whose responses never end early, on either side.

    Its end-of-sequence token has an id beyond the model's vocabulary, which no sampling can draw.
    """
    shutil.copytree(source, target)
    for name in ("config.json", "generation_config.json"):
        _edit(target / name, {"eos_token_id": None})
    vocabulary = json.loads((target / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    known = max(token["id"] for token in tokenizer["added_tokens"])
    assert known < vocabulary, "the model's vocabulary ends at its tokenizer's"
    tokenizer["added_tokens"].append(
        {
            "id": vocabulary,
            "content": _NEVER,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    )
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    _edit(target / "tokenizer_config.json", {"eos_token": _NEVER})
    return target


def _edit(path: Path, changes: dict) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=2))
