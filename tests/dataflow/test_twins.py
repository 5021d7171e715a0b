"""Every shipped tiny recipe runs end to end, a few steps: its own graph, roles and settings."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.dataflow.launch import LaunchOptions, train
from hybridflow.monitor import read_metrics
from hybridflow.recipe.checks import check
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.load import load_recipe

from .kept_server import KeptServer

RECIPES = Path(__file__).parents[2] / "recipes"
TWINS = sorted(p.stem for p in RECIPES.glob("quickstart*.yaml") if "sglang" not in p.stem)
SMALL = ("steps=2", "checkpoint.every=2", "export=false", "data.prompts_per_step=16")


def small(path: Path) -> list[str]:
    """Overrides for a few steps of few rows on one rank a role."""
    recipe = load_recipe(path)
    trained = "reward" if recipe.roles.actor is None else "actor"
    told = [*SMALL, f"roles.{trained}.parallel.dp=1"]
    if recipe.warm_start is not None:
        told += ["warm_start.steps=2", "warm_start.prompts_per_step=16"]
    if recipe.evaluation is not None:
        told += ["evaluation.every=2", "evaluation.prompts=4"]
    if recipe.dataflow == "dapo":  # groups with a signal, of a model that knows nothing yet
        told += ["roles.reward={function: length, parameters: {budget: 1, slack: 7}}"]
    if recipe.algorithm.critic_warmup_steps:
        told += ["algorithm.critic_warmup_steps=1"]
    return told


@pytest.fixture(scope="module")
def home(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory: the quickstart with few rows, and a teacher where one is expected."""
    home = tmp_path_factory.mktemp("home")
    assets = home / "assets/quickstart"
    shutil.copytree(quickstart, assets)
    for path in assets.glob("*.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:128]))
    (home / "runs/quickstart_sft").mkdir(parents=True)
    (home / "runs/quickstart_sft/export").symlink_to(quickstart)
    return home


@pytest.fixture(scope="module")
def kept(home: Path) -> Iterator[KeptServer]:
    server = KeptServer(home / "assets/quickstart")
    yield server
    server.close()


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_runs(
    kept: KeptServer, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(home)
    path = RECIPES / f"{name}.yaml"
    recipe = load_recipe(path, [*small(path), f"output={tmp_path}/run"])
    assert check(recipe) == []
    folder = train(compile_recipe(recipe), lambda logs: kept.session(), LaunchOptions(live=False))
    steps = [row["metrics"] for row in read_metrics(folder) if row["stage"] == "main"]
    assert len(steps) == 2
    assert all(math.isfinite(value) for step in steps for value in step.values())
