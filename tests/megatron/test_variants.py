"""Windows, sinks, two rotary bases, norms after layers: sharing prompts changes nothing."""

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


@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss"])
def test_shared_prompts_equal_huggingface(kind: str, tmp_path: Path):
    path, batch = str(tiny.save(families_dense.model(kind), tmp_path)), make_batch()
    assert max(batch["prompts"].lengths) + 2 > families_dense.WINDOW
    expected = reference(path, batch, GRPO)
    (result,) = run_ranks(_run, 1, path, batch)
    assert result["shares"]
    before = merged([result], "before").values
    assert before.tolist() == pytest.approx(expected["before"].tolist(), rel=1e-4, abs=1e-4)
    metrics = result["metrics"][0]
    assert metrics["loss"] == pytest.approx(expected["losses"][0], rel=1e-5, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected["norms"][0], rel=1e-4)
