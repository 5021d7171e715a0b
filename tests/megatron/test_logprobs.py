"""Vocab-parallel log-probabilities and their gradient against torch's, the vocabulary cut in 3."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from hybridflow.megatron import logprobs
from hybridflow.megatron.full_kl import full_kl
from hybridflow.megatron.logprobs import VocabParallelLogits
from tests.ranks import run_ranks

TOKENS, WIDTH = 7, 5


def data(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits_TV = 30 * torch.randn(TOKENS, 3 * WIDTH, generator=generator)
    logits_TV[:, -2:] = -1e30  # padding of the vocabulary
    labels_T = torch.randint(0, 3 * WIDTH - 2, (TOKENS,), generator=generator)
    return logits_TV.to(dtype), labels_T, torch.randn(TOKENS, generator=generator)


def cut(temperature: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    logits_TV, labels_T, weights_T = data(dtype)
    start = dist.get_rank() * WIDTH
    mine = logits_TV[:, start : start + WIDTH].clone().requires_grad_()
    logits = VocabParallelLogits(mine, labels_T, start, dist.group.WORLD, temperature)
    logprobs_T = logits.read().logprobs_T
    (logprobs_T * weights_T).sum().backward()
    assert mine.grad is not None
    return logprobs_T.detach(), mine.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_whole_softmax(temperature: float, dtype: torch.dtype):
    logits_TV, labels_T, weights_T = data(dtype)
    logits_TV.requires_grad_()
    expected_T = F.log_softmax(logits_TV.float() / temperature, dim=1)
    expected_T = expected_T.gather(1, labels_T[:, None])[:, 0]
    (expected_T * weights_T).sum().backward()
    results = run_ranks(cut, 3, temperature, dtype)
    for logprobs_T, _ in results:
        torch.testing.assert_close(logprobs_T, expected_T.detach(), rtol=1e-5, atol=1e-5)
    gradient_TV = torch.cat([gradient for _, gradient in results], dim=1)
    torch.testing.assert_close(gradient_TV, logits_TV.grad, rtol=1e-5, atol=1e-6)


def read_both(temperature: float, parts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, entropies and the gradient of a mixture of both; a cut over the ranks."""
    logits_TV, labels_T, weights_T = data(torch.float32)
    width = logits_TV.shape[1] // parts
    start = dist.get_rank() * width
    mine = (logits_TV[:, start : start + width] / 10).clone().requires_grad_()
    logits = VocabParallelLogits(mine, labels_T, start, dist.group.WORLD, temperature)
    readings = logits.read(entropy=True)
    assert readings.entropy_T is not None
    (readings.logprobs_T * weights_T + readings.entropy_T * weights_T.flip(0)).sum().backward()
    assert mine.grad is not None
    return readings.logprobs_T.detach(), readings.entropy_T.detach(), mine.grad


@pytest.mark.parametrize("parts", [1, 3])
def test_entropy_and_its_gradient_equal_float64(parts: int):
    logits_TV, labels_T, weights_T = data(torch.float32)
    logits_TV = (logits_TV / 10).double().requires_grad_()
    all_TV = F.log_softmax(logits_TV / 0.7, dim=1)
    logprobs_T = all_TV.gather(1, labels_T[:, None])[:, 0]
    entropy_T = -(all_TV.exp() * all_TV).sum(dim=1)
    (logprobs_T * weights_T + entropy_T * weights_T.flip(0)).sum().backward()
    results = run_ranks(read_both, parts, 0.7, parts)
    for given_T, given_entropy_T, _ in results:
        torch.testing.assert_close(given_T.double(), logprobs_T.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(given_entropy_T.double(), entropy_T, rtol=1e-5, atol=1e-6)
    gradient_TV = torch.cat([gradient for *_, gradient in results], dim=1)
    torch.testing.assert_close(gradient_TV.double(), logits_TV.grad, rtol=1e-5, atol=1e-6)


def test_a_uniform_and_a_certain_distribution():
    """log V, and 0 where all but one probability vanish in float32."""
    logits_TV = torch.tensor([[2.0] * 8, [200.0] + [-200.0] * 7], requires_grad=True)
    one = SimpleNamespace(size=lambda: 1)
    readings = VocabParallelLogits(logits_TV, torch.tensor([0, 0]), 0, one).read(entropy=True)
    assert readings.entropy_T is not None
    assert readings.entropy_T.tolist() == pytest.approx([math.log(8), 0.0], abs=1e-6)
    readings.entropy_T.sum().backward()
    torch.testing.assert_close(logits_TV.grad, torch.zeros(2, 8), atol=1e-6, rtol=0)


def test_rows_are_read_in_small_parts(monkeypatch: pytest.MonkeyPatch):
    """However few rows a temporary holds."""
    one = SimpleNamespace(size=lambda: 1)
    found = []
    for values in (1, 16, 1 << 24):
        monkeypatch.setattr(logprobs, "_SCRATCH_VALUES", values)
        logits_TV = data(torch.float32)[0].requires_grad_()
        readings = VocabParallelLogits(logits_TV, data(torch.float32)[1], 0, one).read(entropy=True)
        assert readings.entropy_T is not None
        (readings.entropy_T.square() + readings.logprobs_T).sum().backward()
        found.append((readings.entropy_T.detach(), logits_TV.grad))
    for entropy_T, gradient_TV in found[1:]:
        assert torch.equal(entropy_T, found[0][0]) and torch.equal(gradient_TV, found[0][1])


def read_kl(temperature: float, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The KL from another distribution and its gradient; a cut over the ranks."""
    logits_TV, labels_T, weights_T = data(torch.float32)
    ref_TV = reference_logits()
    width = logits_TV.shape[1] // parts
    mine = slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)
    leaf_TV = (logits_TV[:, mine] / 10).clone().requires_grad_()
    logits = VocabParallelLogits(leaf_TV, labels_T, mine.start, dist.group.WORLD, temperature)
    kl_T = full_kl(logits, ref_TV[:, mine])
    (kl_T * weights_T).sum().backward()
    assert leaf_TV.grad is not None
    return kl_T.detach(), leaf_TV.grad


def reference_logits() -> torch.Tensor:
    logits_TV = data(torch.float32)[0] / 10
    noise_TV = torch.randn(logits_TV.shape, generator=torch.Generator().manual_seed(3))
    return torch.where(logits_TV < -1e20, logits_TV, logits_TV + noise_TV)


@pytest.mark.parametrize("parts", [1, 3])
def test_the_whole_kl_and_its_gradient_equal_float64(parts: int):
    logits_TV, _, weights_T = data(torch.float32)
    logits_TV = (logits_TV / 10).double().requires_grad_()
    log_p_TV = F.log_softmax(logits_TV / 0.7, dim=1)
    log_q_TV = F.log_softmax(reference_logits().double() / 0.7, dim=1)
    kl_T = (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(dim=1)
    (kl_T * weights_T).sum().backward()
    results = run_ranks(read_kl, parts, 0.7, parts)
    for given_T, _ in results:
        torch.testing.assert_close(given_T.double(), kl_T.detach(), rtol=1e-5, atol=1e-6)
    gradient_TV = torch.cat([gradient for _, gradient in results], dim=1)
    torch.testing.assert_close(gradient_TV.double(), logits_TV.grad, rtol=1e-5, atol=1e-6)
