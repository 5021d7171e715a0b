"""Every transport brings the same weights to the servers, and a run learns the same from them."""

from pathlib import Path
from typing import Any

import pytest

from hybridflow.cluster.local_session import LocalSession
from hybridflow.dataflow.launch import LaunchOptions, train
from hybridflow.dataflow.runner import SerialRunner
from hybridflow.monitor import read_metrics, read_rollouts
from hybridflow.recipe.compile import compile_recipe

WAYS = {
    "standby": [],
    "bucketed": ["roles.rollout.sync={mode: bucketed, bucket: 40KiB}"],
    "disk": ["roles.rollout.sync={transport: disk}"],
    "deltas": ["roles.rollout.sync={transport: disk, full_every: 3}"],
    "colocated": ["roles.rollout.colocate=actor"],
}


def run(recipe: Any) -> Path:
    return train(
        compile_recipe(recipe),
        lambda logs: LocalSession(),
        LaunchOptions(live=False),
        SerialRunner(),
    )


def measured(folder: Path) -> list[dict[str, float]]:
    """Metrics of training, without those of the clock, of memory and of what was published."""
    skipped = ("seconds", "throughput/", "memory/", "publish/")
    return [
        {k: v for k, v in row["metrics"].items() if not any(part in k for part in skipped)}
        for row in read_metrics(folder)
    ]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What the first way's run gave, for the others to equal."""
    return {}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if way == "deltas" else ()) for way in WAYS]
)
def test_a_run_learns_the_same_over_every_transport(
    way: str, make_recipe: Any, tmp_path: Path, seen: dict[str, Any]
) -> None:
    folder = run(make_recipe(f"output={tmp_path}/run", *WAYS[way]))
    rows = list(read_metrics(folder))
    assert rows[-1]["metrics"]["weights/version"] == 4
    assert rows[-1]["metrics"]["update/staleness_max"] == 0
    texts = [(row["prompt"], row["response"], row["version"]) for row in read_rollouts(folder)]
    first = seen.setdefault("first", (measured(folder), texts))
    assert (measured(folder), texts) == first
    if way == "colocated":
        assert rows[-1]["metrics"]["memory/actor_released_bytes"] > 3_900_000, "the gradients"
