"""Arithmetic on rewards: combine, permute, and find the prompts that carry a signal."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import has_spread
from hybridflow.batch import Ragged


def weighted_sum(terms_S: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """``[S]`` float32 ``sum_k weights[k] * terms[k]``, one term per reward."""
    if len(terms_S) != len(weights):
        raise ValueError(
            f"weights has {len(weights)} entries for {len(terms_S)} rewards; give one weight each"
        )
    return torch.stack(
        [weight * term.float() for term, weight in zip(terms_S, weights, strict=True)]
    ).sum(dim=0)


def shuffle(values_S: Tensor, seed: int, step: int) -> Tensor:
    """The values of all samples in a random order that ``seed`` and ``step`` alone decide.

    A control experiment: with shuffled advantages, nothing can be learnt from the rewards.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    return values_S[torch.randperm(len(values_S), generator=generator)]


def soft_overlong(lengths_S: Tensor, longest: int, buffer: int, factor: float = 1.0) -> Tensor:
    """``[S]`` float32 punishment of responses that come near the longest possible one.

    DAPO (Yu et al., 2025, arXiv:2503.14476), equation 13, soft overlong punishment::

        0                                     where length <= longest - buffer
        (longest - buffer - length) / buffer  up to longest
        -1                                    beyond

    times ``factor``. Example: of at most 10 tokens with a buffer of 4, lengths 6, 7 and 10 give 0,
    -0.25 and -1.

    Args:
        lengths_S: ``[S]`` response lengths in tokens.
        longest: most tokens of a response, the buffer included.
    """
    if not 1 <= buffer <= longest:
        raise ValueError(
            f"the buffer of {buffer} tokens must be at least 1 and at most the longest response, "
            f"{longest} tokens"
        )
    share_S = (longest - buffer - lengths_S).float() / buffer
    return share_S.clamp(-1.0, 0.0) * factor


def signal_prompts(rewards_PG: Tensor, held: int, wanted: int) -> list[int]:
    """Prompts whose samples' rewards differ, in order, until ``wanted`` are held.

    DAPO's dynamic sampling (Yu et al., 2025, arXiv:2503.14476, section 3.2): groups that are all
    right or all wrong have no gradient, so sampling goes on until a step's worth is held.

    Args:
        rewards_PG: ``[P, G]`` rewards of newly sampled prompts.
        held: prompts kept from earlier rounds of the step.
    """
    kept = has_spread(rewards_PG).nonzero().flatten().tolist()
    return kept[: max(wanted - held, 0)]


def kl_baseline(logprobs: Ragged, ref_logprobs: Ragged, mask: Ragged | None = None) -> float:
    """KTO's point of reference (Ethayarajh et al., 2024, arXiv:2402.01306, section 4.1)::

        z = max(0, mean over responses of log(pi(y' | x) / ref(y' | x)))

    where y' is the response to another prompt than x, so that the mean estimates the KL of policy
    and reference. In nats, over all responses of the step.

    Args:
        mask: bool, which tokens of a response are the model's own; None: all.
    """
    ratios_T = logprobs.values.double() - ref_logprobs.values.double()
    if mask is not None:
        ratios_T = ratios_T[mask.values]
    return max(0.0, float(ratios_T.sum()) / len(logprobs))


def log_ratio(teacher_T: Tensor, student_T: Tensor) -> Tensor:
    """``[T]`` on-policy distillation's advantage of each sampled token, float32.

    MiniLLM (Gu et al., 2023, arXiv:2306.08543), the policy gradient of the reverse KL on samples of
    the student, one token ahead (its single-step part)::

        A_t = log teacher(y_t | y_<t) - log student(y_t | y_<t)

    whose mean over the student's samples is ``-KL(student || teacher)``. No discount: a token is
    judged by its own step.
    """
    return teacher_T.float() - student_T.float()
