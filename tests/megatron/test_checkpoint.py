"""Saving, going on bit for bit, stages, and learning-rate schedules."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from hybridflow.megatron import checkpoint
from hybridflow.megatron.config import OptimizerSettings
from hybridflow.megatron.schedule import learning_rate
from megatron_bridge.convert.sources import open_checkpoint
from megatron_bridge.layout import ParallelLayout
from tests.megatron.cases import GRPO, OPTIMIZER, make_batch, make_engine, my_part
from tests.ranks import RanksFailed, run_ranks


def go_on(
    path: str, layout: ParallelLayout, folder: Path, **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two steps, a checkpoint, two more; then the last two again from the checkpoint."""
    parts = [my_part(make_batch(seed), layout) for seed in range(4)]

    def last_two(engine: Any) -> dict[str, Any]:
        metrics = [engine.update(part, GRPO) for part in parts[2:]]
        weights = {name: tensor.clone() for name, tensor in engine.export_weights()}
        return {"metrics": metrics, "weights": weights}

    engine = make_engine(path, layout, **options)
    for part in parts[:2]:
        engine.update(part, GRPO)
    engine.save_checkpoint(folder)
    saved = {name: tensor.clone() for name, tensor in engine.export_weights()}
    uninterrupted = last_two(engine) | {"saved": saved}
    resumed = make_engine(path, layout, **options)
    resumed.load_checkpoint(folder)
    return uninterrupted, last_two(resumed)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        (ParallelLayout(), torch.bfloat16),
        (ParallelLayout(dp=2), torch.float32),
        (ParallelLayout(tp=2, pp=2), torch.float32),
    ],
    ids=["one-bf16", "dp2", "tp2pp2"],
)
def test_resume_is_exact(tiny_qwen3: str, tmp_path: Path, layout: ParallelLayout, dtype: Any):
    falling = OptimizerSettings(lr=3e-3, schedule="cosine", warmup_steps=1, total_steps=4)
    results = run_ranks(
        go_on, layout.world, tiny_qwen3, layout, tmp_path / "saved", dtype=dtype, optimizer=falling
    )
    for uninterrupted, resumed in results:
        assert resumed["metrics"] == uninterrupted["metrics"]
        for name, tensor in uninterrupted["weights"].items():
            assert torch.equal(resumed["weights"][name], tensor), name
    _opens_without_a_process_of_its_layout(tmp_path / "saved", results[0][0]["saved"])
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert len(names) == 1 + layout.tp * layout.pp and names[0] == "engine.json"
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize(
    ("model", "layout", "dtype"),
    [
        ("tiny_qwen3_moe", ParallelLayout(dp=2, ep=2), torch.float32),
        ("tiny_deepseek_v3", ParallelLayout(pp=2, dp=2, ep=2), torch.float32),
        ("tiny_deepseek_v3", ParallelLayout(tp=2, dp=2, ep=2, etp=1), torch.bfloat16),
    ],
    ids=["ep2", "pp2ep2", "replicas-of-ep2-bf16"],
)
def test_resume_with_experts_is_exact(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, layout: ParallelLayout, dtype: Any
):
    path = request.getfixturevalue(model)
    folder = tmp_path / "saved"
    results = run_ranks(go_on, layout.world, path, layout, folder, dtype=dtype)
    for uninterrupted, resumed in results:
        assert resumed["metrics"] == uninterrupted["metrics"]
        for name, tensor in uninterrupted["weights"].items():
            assert torch.equal(resumed["weights"][name], tensor), name
    if model == "tiny_deepseek_v3":  # the bias of its router is a buffer
        with pytest.raises(ValueError, match=r"lacks .*router\.expert_bias.*no parameters"):
            open_checkpoint(folder)
    else:
        _opens_without_a_process_of_its_layout(folder, results[0][0]["saved"])
    ranks = range(layout.world)
    dense = {layout.coordinates(rank)._replace(dp=0) for rank in ranks}
    spread = {layout.expert_coordinates(rank)._replace(edp=0) for rank in ranks}
    experts = [
        place for place in spread if model != "tiny_deepseek_v3" or place.pp == layout.pp - 1
    ]
    assert {file.name for file in folder.iterdir()} == {
        "engine.json",
        *(f"tp{place.tp}_pp{place.pp}.safetensors" for place in dense),
        *(f"etp{place.etp}_ep{place.ep}_pp{place.pp}.safetensors" for place in experts),
    }
    assert _expert_elements(folder) == _expert_elements(Path(path))


def _opens_without_a_process_of_its_layout(folder: Path, weights: dict[str, Any]) -> None:
    """As HuggingFace tensors, whole and some of their rows."""
    source = open_checkpoint(folder).source
    assert source.tensors().keys() == weights.keys()
    for name, tensor in weights.items():
        (rows, *columns) = tensor.shape
        others = tuple((0, size) for size in columns)
        assert torch.equal(source.read(name, ((0, rows), *others)), tensor), name
        first, last = rows // 3, rows - rows // 4
        assert torch.equal(source.read(name, ((first, last), *others)), tensor[first:last]), name


def _expert_elements(folder: Path) -> int:
    """Elements of all experts' weights; a checkpoint's optimizer state is left out."""
    found = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name.startswith("model") and ".mlp.experts." in name:
                    found += tensors.get_tensor(name).numel()
    return found


def save(path: str, layout: ParallelLayout, folder: Path) -> None:
    engine = make_engine(path, layout)
    engine.save_checkpoint(folder)
    engine.save_checkpoint(folder)  # in place of one of the same name


def load(path: str, layout: ParallelLayout, folder: Path, **options: Any) -> None:
    make_engine(path, layout, **options).load_checkpoint(folder)


def test_what_does_not_fit_is_refused(tiny_qwen3: str, tied_qwen3: str, tmp_path: Path):
    one = ParallelLayout()
    run_ranks(save, 1, tiny_qwen3, one, tmp_path / "saved")
    with pytest.raises(
        RanksFailed, match="saved at tp=1,pp=1,dp=1 and this run is at tp=1,pp=1,dp=2"
    ):
        run_ranks(load, 2, tiny_qwen3, ParallelLayout(dp=2), tmp_path / "saved")
    with pytest.raises(RanksFailed, match="use the same model"):
        run_ranks(load, 1, tied_qwen3, one, tmp_path / "saved")
    with pytest.raises(RanksFailed, match="set model.dtype as it was"):
        run_ranks(load, 1, tiny_qwen3, one, tmp_path / "saved", dtype=torch.bfloat16)
    with pytest.raises(RanksFailed, match="holds no engine checkpoint"):
        run_ranks(load, 1, tiny_qwen3, one, tmp_path / "absent")
    described = tmp_path / "saved" / "engine.json"
    text = described.read_text()
    described.write_text('{"version": 99, "layout": {"of": "another time"}}')
    with pytest.raises(ValueError, match="a checkpoint of version 99; this code reads"):
        checkpoint.load(tmp_path / "saved", one)
    for damage in ("[]", '{"layout": {}}', text[:-9]):
        described.write_text(damage)
        with pytest.raises(ValueError, match="engine.json is damaged: .*resume from the one"):
            checkpoint.load(tmp_path / "saved", one)
    described.write_text(text)
    file = tmp_path / "saved" / "tp0_pp0.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(RanksFailed, match="tp0_pp0.safetensors is damaged: .*resume from the one"):
        run_ranks(load, 1, tiny_qwen3, one, tmp_path / "saved")


def stages(path: str) -> dict[str, Any]:
    """A step, a new stage, a step; beside the second step of a run that starts there."""
    layout = ParallelLayout()
    engine = make_engine(path, layout, optimizer=OptimizerSettings(lr=1e-2))
    part = my_part(make_batch(), layout)
    engine.update(part, GRPO)
    weights = {name: tensor.clone() for name, tensor in engine.export_weights()}
    engine.begin_stage(OPTIMIZER)
    metrics = engine.update(part, GRPO)
    moved = {name: (tensor - weights[name]) for name, tensor in engine.export_weights()}
    return {"metrics": metrics, "moved": moved}


def test_a_stage_starts_with_fresh_moments(tiny_qwen3: str):
    (result,) = run_ranks(stages, 1, tiny_qwen3)
    assert result["metrics"]["lr"] == OPTIMIZER.lr
    # The first AdamW step of fresh moments moves no weight by more than lr, beside weight decay.
    largest = max(float(moved.abs().max()) for moved in result["moved"].values())
    assert 0.5 * OPTIMIZER.lr < largest <= 1.1 * OPTIMIZER.lr


def test_schedules():
    linear = OptimizerSettings(1.0, schedule="linear", warmup_steps=3, min_lr=0.1, total_steps=7)
    rates = [learning_rate(linear, step) for step in range(9)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1])
    cosine = OptimizerSettings(2.0, schedule="cosine", total_steps=4)
    assert [learning_rate(cosine, step) for step in (0, 2, 4)] == pytest.approx([2.0, 1.0, 0.0])
    constant = OptimizerSettings(3.0, warmup_steps=1)
    assert [learning_rate(constant, step) for step in (0, 1, 99)] == pytest.approx([1.5, 3.0, 3.0])
