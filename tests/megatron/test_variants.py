"""Windows, sinks, two rotary bases, norms after layers, longrope: packs change nothing."""

from pathlib import Path
from typing import Any

import pytest

from hybridflow.batch import Batch
from megatron_bridge.layout import ParallelLayout
from tests.bridge import families_dense, tiny
from tests.megatron.cases import GRPO, make_batch, make_engine, merged, two_steps
from tests.megatron.test_reference import reference
from tests.ranks import run_ranks


def _run(path: str, batch: Batch) -> dict[str, Any]:
    shares = make_engine(path, ParallelLayout())._packed.shares_prompts
    return {"shares": shares} | two_steps(path, ParallelLayout(), batch, GRPO)


# Phi-3 has sequences of both kinds: up to this length and longer.
FIELDS = {"phi3": {"original_max_position_embeddings": 10}}


@pytest.mark.parametrize(("kind", "shares"), [("gemma3", True), ("gpt_oss", True), ("phi3", False)])
def test_packs_equal_huggingface(kind: str, shares: bool, tmp_path: Path):
    """Phi-3 shares no prompts: its rotary angles depend on the whole sequence's length."""
    model = families_dense.model(kind, **FIELDS.get(kind, {}))
    path, batch = str(tiny.save(model, tmp_path)), make_batch()
    assert max(batch["prompts"].lengths) + 2 > families_dense.WINDOW
    expected = reference(path, batch, GRPO)
    (result,) = run_ranks(_run, 1, path, batch)
    assert result["shares"] == shares
    before = merged([result], "before").values
    assert before.tolist() == pytest.approx(expected["before"].tolist(), rel=1e-4, abs=1e-4)
    metrics = result["metrics"][0]
    assert metrics["loss"] == pytest.approx(expected["losses"][0], rel=1e-5, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected["norms"][0], rel=1e-4)
