"""A tiny model with its data, and recipes over them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hybridflow.assets import make_quickstart
from hybridflow.recipe.load import load_recipe
from hybridflow.recipe.schema import Recipe

MakeRecipe = Callable[..., Recipe]


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model and data."""
    folder = tmp_path_factory.mktemp("assets") / "quickstart"
    make_quickstart(folder)
    return folder


def recipe_of(assets: Path, output: Path) -> dict:
    """A recipe of two supervised and three GRPO steps; a small step, of uneven numbers."""
    return {
        "name": "tiny",
        "output": str(output),
        "model": {"path": str(assets)},
        "cluster": {"devices_per_node": 3},
        "data": {
            "train": str(assets / "train.jsonl"),
            "eval": str(assets / "eval.jsonl"),
            "max_prompt_tokens": 16,
            "prompts_per_step": 6,
            "samples_per_prompt": 4,
        },
        "warm_start": {"steps": 2, "prompts_per_step": 10, "lr": 2e-3},
        "steps": 3,
        "roles": {
            "actor": {"optimizer": {"lr": 1e-3, "schedule": "cosine"}},
            "rollout": {"sampling": {"max_tokens": 5}},
            "reward": {"function": "exact_match"},
        },
        "dataflow": "grpo",
        "evaluation": {"every": 2, "prompts": 5},
        "checkpoint": {"every": 2},
    }


@pytest.fixture
def recipe_file(quickstart: Path, tmp_path: Path) -> Path:
    """The tiny recipe as a file."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe_of(quickstart, tmp_path / "run"), sort_keys=False))
    return path


@pytest.fixture
def make_recipe(recipe_file: Path) -> MakeRecipe:
    """Loads the tiny recipe with overrides."""
    return lambda *overrides: load_recipe(recipe_file, overrides)
