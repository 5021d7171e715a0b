"""A tiny model with a chat template, and rows of every kind: conversations, pairs, labels."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.assets.quickstart import PAD, VOCABULARY, character_tokenizer
from hybridflow.cluster import LocalSession
from hybridflow.dataflow.launch import LaunchOptions, train
from hybridflow.monitor import read_metrics
from hybridflow.recipe.checks import check
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.load import load_recipe

TEMPLATE = (
    "{% for m in messages %}+{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>"
    "{% endif %}={% endfor %}{% if add_generation_prompt %}+{% endif %}"
)
ROWS = 24
RunRecipe = Callable[..., list[dict[str, float]]]


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``model`` and ``plain`` (the same without a chat template), train and held-out rows."""
    folder = tmp_path_factory.mktemp("beyond")
    _write_model(folder / "plain", None)
    _write_model(folder / "model", TEMPLATE)
    for name, seed in (("train", 0), ("eval", 1)):
        _write_rows(folder / f"{name}.jsonl", random.Random(seed))
    return folder


def _write_model(folder: Path, template: str | None) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=VOCABULARY.index(PAD),
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _write_rows(path: Path, chance: random.Random) -> None:
    rows = []
    for number in range(ROWS):
        a, b = chance.randrange(50), chance.randrange(50)
        talk = [("user", f"{a}+{b}"), ("assistant", f"{a + b}"), ("user", f"{b}+{a}")]
        talk += [("assistant", f"{b + a}")]
        rows.append(
            {
                "prompt": f"{a}+{b}=",
                "answer": f"{a + b}",
                "messages": [{"role": role, "content": text} for role, text in talk],
                "chosen": f"{a + b}",
                "rejected": "0" * (1 + number % 4),
                "label": number % 3 > 0,
                "margin": 0.1 * (number % 5),
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe_of(assets: Path, output: Path, dataflow: str) -> dict[str, Any]:
    """A recipe of three steps of six rows in small packs, evaluated and saved every second."""
    return {
        "name": dataflow,
        "output": str(output),
        "model": {"path": str(assets / "plain")},
        "cluster": {"devices_per_node": 2},
        "data": {
            "train": str(assets / "train.jsonl"),
            "eval": str(assets / "eval.jsonl"),
            "max_prompt_tokens": 32,
            "prompts_per_step": 6,
        },
        "steps": 3,
        "roles": {"actor": {"optimizer": {"lr": 1e-3}, "micro_batch_tokens": 40}},
        "dataflow": dataflow,
        "evaluation": {"every": 2, "prompts": 7},
    }


@pytest.fixture
def write_recipe(assets: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny recipe of a dataflow as a file."""

    def write(dataflow: str, output: Path | None = None) -> Path:
        path = tmp_path / f"{dataflow}.yaml"
        recipe = recipe_of(assets, output or tmp_path / "run", dataflow)
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return path

    return write


@pytest.fixture
def run_recipe(write_recipe: Callable[..., Path]) -> RunRecipe:
    """Checks and trains a tiny recipe in this process; the metrics of every step."""

    def run(dataflow: str, *overrides: str, resume: bool = False) -> list[dict[str, float]]:
        recipe = load_recipe(write_recipe(dataflow), overrides)
        assert check(recipe) == []
        plan = compile_recipe(recipe)
        options = LaunchOptions(live=False, resume=resume)
        folder = train(plan, lambda logs: LocalSession(), options)
        return [row["metrics"] for row in read_metrics(folder)]

    return run


@pytest.fixture
def other_model(assets: Path, tmp_path: Path) -> Path:
    """The tiny model with other weights."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(assets / "plain")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.3 * parameter.std() * noise)
    model.save_pretrained(folder)
    for file in (assets / "plain").glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder
