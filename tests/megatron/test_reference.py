"""The engine against HuggingFace and torch's AdamW, written out independently."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridflow.algorithms.advantages import group_relative
from hybridflow.batch import Batch
from hybridflow.megatron.config import LossSettings
from megatron_bridge.layout import ParallelLayout
from tests.megatron.cases import GRPO, OPTIMIZER, PROMPTS, SAMPLES, make_batch, merged, two_steps
from tests.ranks import run_ranks


def reference_logprobs(model: Any, batch: Batch, temperature: float) -> list[Tensor]:
    """One unpadded sequence at a time, through the whole softmax."""
    rows = []
    for sample, response in enumerate(batch["responses"]):
        prompt = batch["prompts"][sample // SAMPLES]
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        rows.append(F.log_softmax(logits / temperature, dim=-1).gather(1, response[:, None])[:, 0])
    return rows


def grpo_loss(logps: list[Tensor], batch: Batch, loss: LossSettings) -> Tensor:
    """GRPO on-policy, token mean: the ratio is 1 and only its gradient matters."""
    total, count = torch.zeros(()), 0
    for sample, logp in enumerate(logps):
        ratio = torch.exp(logp - logp.detach())
        gap = batch["ref_logprobs"][sample] - logp
        kl = gap.exp() - gap - 1
        total = total + (-ratio * batch["advantages"][sample] + loss.kl_coef * kl).sum()
        count += len(logp)
    return total / count


def reference(path: str, batch: Batch, loss: LossSettings) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    plain = [p for p in model.parameters() if p.ndim > 1]
    spared = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": plain, "weight_decay": OPTIMIZER.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, foreach=False
    )
    found: dict[str, Any] = {"losses": [], "norms": []}
    with torch.no_grad():
        found["before"] = torch.cat(reference_logprobs(model, batch, loss.temperature))
    for _ in range(2):
        optimizer.zero_grad()
        value = grpo_loss(reference_logprobs(model, batch, loss.temperature), batch, loss)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        optimizer.step()
        found["losses"].append(value.item())
        found["norms"].append(norm.item())
    found["weights"] = {name: p.detach() for name, p in model.named_parameters()}
    return found


@pytest.fixture(scope="module")
def batch() -> Batch:
    made = make_batch()
    rewards_PG = made["advantages"].reshape(PROMPTS, SAMPLES)
    return made.with_field(
        "advantages", made.axes["advantages"], group_relative(rewards_PG).flatten()
    )


def test_two_steps_equal_huggingface(tiny_qwen3: str, batch: Batch):
    expected = reference(tiny_qwen3, batch, GRPO)
    layout = ParallelLayout()
    (result,) = run_ranks(two_steps, 1, tiny_qwen3, layout, batch, GRPO)
    before = merged([result], "before").values
    torch.testing.assert_close(before, expected["before"], rtol=1e-5, atol=1e-5)
    for step, metrics in enumerate(result["metrics"]):
        assert metrics["loss"] == pytest.approx(expected["losses"][step], rel=1e-5, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(expected["norms"][step], rel=1e-5)
        assert metrics["grad_norm"] > OPTIMIZER.clip_grad  # clipping takes part in the comparison
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(result["weights"][name], weight, rtol=1e-5, atol=2e-6)


def test_metrics_by_hand(tiny_qwen3: str, batch: Batch):
    expected = reference(tiny_qwen3, batch, GRPO)["before"]
    threshold = 1.0
    loss = replace(GRPO, agreement_threshold=threshold)
    (result,) = run_ranks(two_steps, 1, tiny_qwen3, ParallelLayout(), batch, loss)
    metrics = result["metrics"][0]
    ratio = (expected - batch["rollout_logprobs"].values).exp()  # trainer / rollout
    gap = ratio.log().abs()
    reference_gap = batch["ref_logprobs"].values - expected
    assert metrics["rollout_gap_mean"] == pytest.approx(gap.mean().item(), rel=1e-4)
    assert metrics["rollout_gap_max"] == pytest.approx(gap.max().item(), rel=1e-4)
    assert metrics["rollout_kl"] == pytest.approx((ratio - 1 - ratio.log()).mean().item(), rel=1e-4)
    assert 0 < metrics["rollout_gap_share"] < 1
    assert metrics["rollout_gap_share"] == pytest.approx((gap > threshold).float().mean().item())
    assert metrics["kl"] == pytest.approx(
        (reference_gap.exp() - reference_gap - 1).mean().item(), rel=1e-4
    )
    assert metrics["entropy_estimate"] == pytest.approx(-expected.mean().item(), rel=1e-4)
    assert metrics["tokens"] == len(expected)
    assert metrics["response_length_mean"] == pytest.approx(len(expected) / (PROMPTS * SAMPLES))
    assert metrics["ratio_mean"] == 1 and metrics["clip_fraction"] == 0
    assert metrics["lr"] == OPTIMIZER.lr and math.isfinite(metrics["loss"])
