"""What is legitimate for a step and suspicious when it stays: told once, when it begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """A metric that should not stay so.

    Attributes:
        holds: whether a value is suspicious.
        steps: in a row before it is told; the last step of a stage tells what held in all of them.
        text: what it means and what to do.
    """

    metric: str
    holds: Callable[[float], bool]
    steps: int
    text: str


RULES = (
    Rule(
        "advantage/zero_share",
        lambda share: share == 1,
        1,
        "every advantage is 0 (advantage/zero_share), so the rewards teach nothing in this step: "
        "the samples of each prompt score alike. Other prompts, a higher temperature, or the "
        "dataflow dapo, which samples until there is a difference",
    ),
    Rule(
        "reward/constant",
        lambda constant: constant == 1,
        10,
        "every reward of the run is the same number (reward/constant): look whether the reward "
        "function reads what it is to judge; rollouts.jsonl has the responses",
    ),
    Rule(
        "length/truncated",
        lambda share: share == 1,
        3,
        "every response is cut off at max_tokens (length/truncated), so none ends by itself: "
        "raise roles.rollout.sampling.max_tokens, or look at the prompt and the chat template",
    ),
)


class Watch:
    """The rules over the steps of a stage of ``steps`` steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._seen: dict[str, int] = {}
        self._held: dict[str, int] = {}

    def see(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """What to tell of this step."""
        told = []
        for rule in RULES:
            if rule.metric not in metrics:
                continue
            self._seen[rule.metric] = self._seen.get(rule.metric, 0) + 1
            held = self._held.get(rule.metric, 0) + 1 if rule.holds(metrics[rule.metric]) else 0
            self._held[rule.metric] = held
            always = held == self._seen[rule.metric] < rule.steps and step == self._steps
            if held == rule.steps or always:
                told.append(f"step {step}: {rule.text}")
        return told
