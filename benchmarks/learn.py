"""Every algorithm on the quickstart's model until its reward moves: python -m benchmarks.learn

One supervised stage makes the model that all of them start from, half trained. Each then runs as a
user would run it, by `hybridflow train` on its recipe; the figures are the runs' own metrics.
Exit status 1: a reward did not rise, or a cost did not come under its limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from hybridflow.assets import make_quickstart
from hybridflow.monitor import read_metrics
from hybridflow.monitor.series import Series, series_of
from hybridflow.monitor.svg import line_chart

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "learn.json"
PICTURES = ROOT / "docs" / "assets"
WINDOW = 5
"""Steps whose mean is a run's first and last figure."""

PALETTE = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#64748b")


@dataclass(frozen=True)
class Algorithm:
    """A recipe and what it changes.

    Attributes:
        rise: by which the reward must rise.
        limit: of the mean cost at the end; None: it has none.
    """

    recipe: str
    overrides: tuple[str, ...] = ()
    rise: float = 0.05
    limit: float | None = None


SLOWER = "roles.actor.optimizer.lr=3e-4"
"""At the quickstart's rate a model that is only half trained loses half of its reward at first."""

# Safe RLHF may lose some reward to the limit: right sums of 100 and more are what costs.
ALGORITHMS = {
    "ppo": Algorithm("quickstart_ppo"),
    "grpo": Algorithm("quickstart", (SLOWER,)),
    "rloo": Algorithm("quickstart", (SLOWER, "dataflow=rloo")),
    "remax": Algorithm("quickstart_remax"),
    "dapo": Algorithm("quickstart_dapo"),
    "safe_rlhf": Algorithm("quickstart_safe_rlhf", rise=0.0, limit=0.3),
}


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    args.work.mkdir(parents=True, exist_ok=True)
    assets, start = args.work / "quickstart", args.work / "start"
    make_quickstart(assets)
    _warm_start(assets, start, args.warm_steps)
    found = json.loads(args.results.read_text()) if args.results.is_file() else {}
    for name in args.algorithms:
        rows = _run(name, assets, start, args)
        found[name] = _summary(name, rows)
        args.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {_told(found[name])}", flush=True)
    _draw(found, args.pictures)
    return 0 if all(found[name]["learnt"] for name in args.algorithms) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=[*ALGORITHMS])
    parser.add_argument("--steps", type=int, default=120, help="steps of each algorithm")
    parser.add_argument("--warm-steps", type=int, default=110, help="supervised steps before")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "learn", help="folder of runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--pictures", type=Path, default=PICTURES)
    return parser


def _warm_start(assets: Path, start: Path, steps: int) -> None:
    """The half-trained model, where it is not there yet."""
    if not (start / "export").is_dir():
        told = [
            *("dataflow=sft", f"steps={steps}", "warm_start=null", "evaluation=null"),
            *("algorithm={}", "roles.actor.optimizer={lr: 2e-3}", "checkpoint.every=null"),
            *("data.prompts_per_step=128", "data.samples_per_prompt=1", "roles.reward=null"),
        ]
        _train("quickstart", assets, assets, start, told)


def _run(name: str, assets: Path, start: Path, args: argparse.Namespace) -> list[dict]:
    algorithm = ALGORITHMS[name]
    told = ["warm_start=null", f"steps={args.steps}", "export=false", "checkpoint.every=null"]
    told += [f"evaluation.every={max(1, args.steps // 4)}", *algorithm.overrides]
    _train(algorithm.recipe, assets, start / "export", args.work / name, told)
    return list(read_metrics(args.work / name))


def _train(recipe: str, assets: Path, model: Path, output: Path, told: Sequence[str]) -> None:
    """`hybridflow train` on a shipped recipe over assets that lie elsewhere."""
    overrides = [
        *(f"model.path={model}", f"data.train={assets}/train.jsonl"),
        *(f"data.eval={assets}/eval.jsonl", f"output={output}", *told),
    ]
    path = ROOT / "recipes" / f"{recipe}.yaml"
    subprocess.run(
        [sys.executable, "-m", "hybridflow.cli", "train", str(path), *overrides],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _summary(name: str, rows: list[dict]) -> dict:
    """First and last figures of the main stage, and its curves."""
    main = [row for row in rows if row["stage"] == "main"]
    curves = {
        metric: [row["metrics"][metric] for row in main if metric in row["metrics"]]
        for metric in ("reward/mean", "cost/mean", "critic/explained_variance", "state/lambda")
        if metric in main[-1]["metrics"]
    }
    reward = curves["reward/mean"]
    first, last = fmean(reward[:WINDOW]), fmean(reward[-WINDOW:])
    algorithm = ALGORITHMS[name]
    learnt = last >= first + algorithm.rise
    found = {"steps": len(main), "first": first, "last": last, "curves": curves}
    if algorithm.limit is not None:
        cost = fmean(curves["cost/mean"][-WINDOW:])
        found |= {"limit": algorithm.limit, "last_cost": cost}
        learnt = learnt and cost <= algorithm.limit
    return found | {"learnt": learnt}


def _told(found: dict) -> str:
    text = f"reward {found['first']:.3f} -> {found['last']:.3f} in {found['steps']} steps"
    if "limit" in found:
        first = fmean(found["curves"]["cost/mean"][:WINDOW])
        text += f"; cost {first:.3f} -> {found['last_cost']:.3f}, limit {found['limit']}"
    return text


def _draw(found: dict, folder: Path) -> None:
    """The rewards of all algorithms, and reward and cost under the limit."""
    rewards = [(name, _series(entry, "reward/mean")) for name, entry in found.items()]
    (folder / "learn_rewards.svg").write_text(_picture(rewards), encoding="utf-8")
    if "safe_rlhf" in found:
        entry = found["safe_rlhf"]
        lines = [("reward", _series(entry, "reward/mean")), ("cost", _series(entry, "cost/mean"))]
        (folder / "learn_safe_rlhf.svg").write_text(_picture(lines), encoding="utf-8")


def _series(entry: dict, metric: str) -> Series:
    rows = [
        {"step": step, "metrics": {metric: value}}
        for step, value in enumerate(entry["curves"][metric], start=1)
    ]
    return series_of(rows, metric)


def _picture(lines: list[tuple[str, Series]]) -> str:
    """A chart of the report as a file of its own: colours and a legend come with it."""
    colours = "".join(f".c{i}{{stroke:{c}}}.k{i}{{fill:{c}}}" for i, c in enumerate(PALETTE))
    style = (
        "text{font:10px sans-serif;fill:#64748b}.end{text-anchor:end}.middle{text-anchor:middle}"
        ".grid{stroke:#e2e8f0}.axis{stroke:#94a3b8}.line{fill:none;stroke-width:1.6}"
        ".raw{opacity:.25;stroke-width:1}.band{opacity:0}.hover,.hit{display:none}" + colours
    )
    legend = "".join(
        f'<text x="{54 + 62 * (i % 5)}" y="{14 + 12 * (i // 5)}" class="k{i}" '
        f'style="fill:{PALETTE[i]}">{label}</text>'
        for i, (label, _) in enumerate(lines)
    )
    head, _, body = line_chart(lines).partition(">")
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return f"{head}><style>{style}</style>{body.removesuffix('</svg>')}{legend}</svg>\n"


if __name__ == "__main__":
    sys.exit(main())
