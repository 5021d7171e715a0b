"""The shipped recipes, run as a user runs them."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hybridflow.assets import make_quickstart, make_reasoning_gym, make_smollm2
from hybridflow.monitor import read_metrics
from tests.dataflow.commands import TrainCommand

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model and data."""
    folder = tmp_path_factory.mktemp("assets") / "quickstart"
    make_quickstart(folder)
    return folder


def overrides(assets: Path, output: Path) -> list[str]:
    """A quickstart recipe over assets that lie elsewhere."""
    return [
        f"model.path={assets}",
        f"data.train={assets}/train.jsonl",
        f"data.eval={assets}/eval.jsonl",
        f"output={output}",
    ]


def rewards(folder: Path) -> list[float]:
    """Mean reward of every step of the main stage."""
    return [row["metrics"]["reward/mean"] for row in read_metrics(folder) if row["stage"] == "main"]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(600)
def test_quickstart_on_sglang(quickstart: Path, tmp_path: Path) -> None:
    """Each version is proven by the server's own checksum, and both sides agree on the tokens."""
    folder = tmp_path / "run"
    small = ["warm_start.steps=2", "steps=2", "data.prompts_per_step=8", "evaluation.prompts=8"]
    small += ["roles.rollout.start_timeout_seconds=400"]
    run = TrainCommand(
        RECIPES / "quickstart_sglang.yaml", *overrides(quickstart, folder), *small, deadline=500
    )
    assert run.wait() == 0, run.output
    assert not run.left_over()
    steps = [row["metrics"] for row in read_metrics(folder) if row["stage"] == "main"]
    assert [step["weights/version"] for step in steps] == [2, 3]
    # float32 on both sides: other kernels, other orders of sums
    assert all(step["update/rollout_gap_max"] < 1e-4 for step in steps)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_quickstart_learns(quickstart: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = TrainCommand(RECIPES / "quickstart.yaml", *overrides(quickstart, folder), deadline=1700)
    assert run.wait() == 0, run.output
    assert mean(rewards(folder)[:5]) <= 0.6
    assert mean(rewards(folder)[-5:]) >= 0.85


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_shuffled_advantages_do_not_learn(quickstart: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = TrainCommand(
        RECIPES / "quickstart_control.yaml", *overrides(quickstart, folder), deadline=1700
    )
    assert run.wait() == 0, run.output
    assert mean(rewards(folder)[-5:]) <= mean(rewards(folder)[:5]) + 0.05


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model, and prompts from reasoning-gym."""
    folder = tmp_path_factory.mktemp("smollm2")
    make_smollm2(folder / "model")
    make_reasoning_gym(folder / "data")
    return folder / "model", folder / "data"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", ["dp=2", "pp=2"])
def test_smollm2(smollm2: tuple[Path, Path], tmp_path: Path, layout: str) -> None:
    model, data = smollm2
    folder = tmp_path / "run"
    sizes = {"dp": 1, "pp": 1} | {layout[:2]: 2}
    run = TrainCommand(
        RECIPES / "smollm2_135m_grpo.yaml",
        f"model.path={model}",
        f"data.train={data}/train.jsonl",
        f"data.eval={data}/eval.jsonl",
        f"output={folder}",
        "steps=2",
        *(f"roles.actor.parallel.{name}={size}" for name, size in sizes.items()),
        deadline=1700,
    )
    assert run.wait() == 0, run.output
    steps = [row["metrics"] for row in read_metrics(folder)]
    assert [step["weights/version"] for step in steps] == [1, 2]
    assert all(step["update/rollout_gap_max"] < 1e-3 for step in steps)
    exported = AutoModelForCausalLM.from_pretrained(folder / "export")
    assert exported.config.tie_word_embeddings
