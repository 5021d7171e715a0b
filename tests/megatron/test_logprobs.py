"""Vocab-parallel log-probabilities and their gradient against torch's, the vocabulary cut in 3."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from hybridflow.megatron.logprobs import vocab_parallel_logprobs
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
    logprobs_T = vocab_parallel_logprobs(
        mine, labels_T, vocab_start=start, group=dist.group.WORLD, temperature=temperature
    )
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
