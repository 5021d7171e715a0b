"""Every shipped recipe is sound over the files that it names; every dataflow has two recipes."""

import json
import re
import struct
from functools import cache
from pathlib import Path

import pyarrow
import pytest

from hybridflow.recipe.activate import SHIPPED, shipped
from hybridflow.recipe.checks import check_file
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.load import load_recipe
from megatron_bridge.mappings import huggingface_shapes
from megatron_bridge.translation import resolve

from .conftest import CONFIG

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
SCREEN = 45
CONTROLS = {"grpo_shuffled"}
"""Dataflows that show that nothing is learnt: at the quickstart's size alone."""

QWEN3_8B = CONFIG | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 36,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
QWEN3_32B = QWEN3_8B | {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
}
SCORER = QWEN3_8B | {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
QUICKSTART = CONFIG | {"max_position_embeddings": 64}
MODELS = {
    "assets/quickstart": QUICKSTART,
    "assets/smollm2-135m": CONFIG | {"max_position_embeddings": 2048},
    "runs/quickstart_sft/export": QUICKSTART,
    "models/Qwen3-8B": QWEN3_8B,
    "models/Qwen3-8B-Base": QWEN3_8B,
    "models/Qwen3-32B": QWEN3_32B,
    "models/reward": SCORER,
    "models/cost": SCORER,
}
ROWS = 1024
COLUMNS = {
    "prompt": "1+1=",
    "answer": "2",
    "chosen": "2",
    "rejected": "3",
    "label": True,
    "messages": [{"role": "user", "content": "1+1="}],
    "response_0": "2",
}
TEXT_FILES = ["assets/quickstart/train", "assets/quickstart/eval", "assets/quickstart/pairs"]
TEXT_FILES += ["assets/quickstart/pairs_eval", "assets/reasoning_gym/train"]
TEXT_FILES += ["assets/reasoning_gym/eval"]
DATASETS = ["ultrafeedback/train_prefs", "ultrafeedback/test_prefs", "kto_mix/train"]
DATASETS += ["kto_mix/test", "no_robots/train", "no_robots/test", "safe_rlhf/train"]


def write_model(folder: Path, config: dict) -> None:
    """A model of the published shapes whose weights are a file of holes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    header, end = {}, 0
    for name, shape in huggingface_shapes(resolve(config)).items():
        size = 2
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_dataset(folder: Path) -> None:
    """As ``datasets.Dataset.save_to_disk`` writes one."""
    folder.mkdir(parents=True)
    table = pyarrow.table({name: [value] * ROWS for name, value in COLUMNS.items()})
    with pyarrow.ipc.new_stream(str(folder / "data.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with all that the recipes name."""
    home = tmp_path_factory.mktemp("home")
    for name, config in MODELS.items():
        write_model(home / name, config)
    (home / "runs/quickstart_sft/metrics.jsonl").touch()  # of the run that made the teacher
    for name in TEXT_FILES:
        path = home / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((json.dumps(COLUMNS) + "\n") * ROWS)
    for name in DATASETS:
        write_dataset(home / "data" / name)
    python = home / ".venv-sglang/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    return home


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_passes_check(
    home: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    recipe, faults = check_file(path)
    assert recipe is not None and faults == []
    cluster = recipe.cluster
    assert compile_recipe(recipe).devices == cluster.nodes * cluster.devices_per_node
    assert recipe.folder == f"runs/{path.stem}" and recipe.name == path.stem.replace("_", "-")
    text = path.read_text().splitlines()
    assert len(text) <= SCREEN and max(map(len, text)) <= 110, "a recipe is at most a screen"


@cache
def dataflows(cluster: bool) -> dict[str, str]:
    """Dataflow -> a shipped recipe of it, for a cluster of GPUs or for a laptop."""
    found = {}
    for path in RECIPES:
        recipe = load_recipe(path)
        if (recipe.cluster.devices_per_node == 8) == cluster:
            found[str(recipe.dataflow)] = path.stem
    return found


@pytest.mark.parametrize("name", shipped())
def test_a_dataflow_is_a_screen_and_has_its_recipes(name: str) -> None:
    assert len((SHIPPED / f"{name}.yaml").read_text().splitlines()) <= 60
    assert name in dataflows(cluster=False)
    assert name in dataflows(cluster=True) or name in CONTROLS


def test_the_readme_lists_every_recipe() -> None:
    text = (FOLDER / "README.md").read_text()
    named = set(re.findall(r"`(\w+)\.yaml`", text))
    assert named == {path.stem for path in RECIPES}
    for row in re.findall(r"\| `(\w+)` \| `(\w+)\.yaml` \| `(\w+)\.yaml` \|", text):
        dataflow, *recipes = row
        assert [load_recipe(FOLDER / f"{name}.yaml").dataflow for name in recipes] == [dataflow] * 2
    for path in {*MODELS, *(f"data/{name.split('/')[0]}" for name in DATASETS)}:
        assert path in text, "how to get it"
