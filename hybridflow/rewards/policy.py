"""What a role's rewards are made of, and what a sample without a score gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hybridflow.rewards.items import RewardItem
from hybridflow.rewards.outcomes import Failure, Outcome, RewardError, complaint

OnError = Literal["fail", "group_mean"] | float
"""``fail`` ends the run; a number is the sample's reward, or that of each of its tokens;
``group_mean`` is the mean of the prompt's scored samples, whose advantage over its group is 0."""


@dataclass(frozen=True)
class FunctionSettings:
    """One of the functions whose weighted sum is a role's reward.

    Attributes:
        name: in metrics.
        function, parameters: as ``resolve`` takes them.
        on_error: what a sample gets whose call failed or took too long.
        source: what the file of a ``file.py:function`` held, which runs whatever it holds by now;
            None: what the worker finds there.
    """

    name: str
    function: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    on_error: OnError = "fail"
    source: bytes | None = None


def settle(
    settings: FunctionSettings,
    items: Sequence[RewardItem],
    outcomes: Sequence[Outcome],
    samples_per_prompt: int,
) -> list[float] | list[list[float]]:
    """A value for every sample, failed ones by the policy; lists of the tokens' values where the
    items have tokens.

    Raises:
        RewardError: a call failed, and the policy is ``fail``; names function and sample.
    """
    failed = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Failure)]
    if failed and settings.on_error == "fail":
        first = outcomes[failed[0]]
        assert isinstance(first, Failure)
        others = f" ({len(failed)} of {len(items)} samples failed)" if len(failed) > 1 else ""
        where = complaint(settings.function, items[failed[0]], failed[0], first.text)
        raise RewardError(f"{where}{others}; `on_error` gives such samples a reward instead")
    values: list[Any] = list(outcomes)
    for index in failed:
        fallback = settings.on_error
        if fallback == "group_mean":
            fallback = _group_mean(outcomes, index, samples_per_prompt)
        tokens = items[index].tokens
        values[index] = fallback if tokens is None else [fallback] * len(tokens)
    return values


def _group_mean(outcomes: Sequence[Outcome], index: int, samples_per_prompt: int) -> float:
    """Of the scored samples of the same prompt; 0 where there is none."""
    start = index - index % samples_per_prompt
    group = outcomes[start : start + samples_per_prompt]
    scored = [outcome for outcome in group if isinstance(outcome, float)]
    return sum(scored) / len(scored) if scored else 0.0
