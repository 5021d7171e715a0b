"""What is legitimate for a step and suspicious when it stays: told once, when it begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

_LARGE_GAP = 0.2
"""In nats a token: ten times what 16-bit arithmetic makes."""


@dataclass(frozen=True)
class Rule:
    """A metric that should not stay so.

    Attributes:
        metric: its name, or a pattern of names.
        holds: whether a value is suspicious.
        steps: in a row before it is told; the last step of a stage tells what held in all of them.
        text: what it means and what to do; ``{metric}`` and ``{value:g}`` are filled in.
        beside: a metric that the step must have too, else the rule does not apply.
    """

    metric: str
    holds: Callable[[float], bool]
    steps: int
    text: str
    beside: str = ""


RULES = (
    Rule(
        "advantage/zero_share",
        lambda share: share == 1,
        1,
        "every advantage is 0 (advantage/zero_share), so the rewards teach nothing in this step: "
        "the samples of each prompt score alike. Other prompts, a higher temperature, or the "
        "dataflow dapo, which samples until there is a difference",
        beside="reward/mean",
    ),
    Rule(
        "reward/constant",
        lambda constant: constant == 1,
        10,
        "all rewards of a step are one number, step after step (reward/constant): look whether the "
        "reward function reads what it is to judge; rollouts.jsonl has the responses",
    ),
    Rule(
        "?*/*constant",  # of a further reward, a cost, or one of a role's functions
        lambda constant: constant == 1,
        10,
        "all values of a step are one number, step after step ({metric}): look whether that "
        "function reads what it is to judge; rollouts.jsonl has the responses",
    ),
    Rule(
        "reward/good_share",
        lambda share: share in (0, 1),
        10,
        "every response has the same label (reward/good_share is {value:g}), so the process reward "
        "model learns nothing of what is good: set `above` of the node outcome_labels between the "
        "rewards of good and bad responses",
    ),
    Rule(
        "*/skipped_steps",
        lambda count: count > 0,
        1,
        "{value:g} mini-batches have no token that takes part in the loss and took no optimizer "
        "step ({metric}): every response of theirs is masked, or was rejected by "
        "algorithm.rollout_correction",
    ),
    Rule(
        "reward/*/errors",
        lambda count: count > 0,
        1,
        "{value:g} samples have the value of on_error, since their function failed ({metric}); the "
        "role's log in the run's folder `logs` has the messages",
    ),
    Rule(
        "reward/*/timeouts",
        lambda count: count > 0,
        1,
        "{value:g} samples have the value of on_error, since their function was late ({metric}): "
        "raise sample_timeout_seconds or timeout_seconds, or look why it is slow",
    ),
    Rule(
        "update/correction_share",
        lambda share: share == 1,
        1,
        "every token's ratio of trainer to rollout is out of algorithm.rollout_correction's bounds "
        "(update/correction_share): under `masked` and `rejection` nothing is learnt. Look at "
        "update/rollout_gap_mean, and at the bounds",
    ),
    Rule(
        "update/rollout_gap_mean",
        lambda gap: gap > _LARGE_GAP,
        1,
        "rollout and trainer differ by {value:.2g} nats a token (update/rollout_gap_mean): the "
        "servers hold other weights or compute another model, or samples are very old. "
        "algorithm.agreement.bound makes it an error",
    ),
    Rule(
        "?*/explained_variance",
        lambda share: share < 0,
        10,
        "the critic's values tell the returns worse than a constant would ({metric} is "
        "{value:.2g}): more algorithm.critic_warmup_steps, or another learning rate of its role",
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

    def saved(self) -> dict[str, dict[str, int]]:
        """What a checkpoint keeps, so that a run that goes on does not count from 0."""
        return {"seen": dict(self._seen), "held": dict(self._held)}

    def restore(self, told: Mapping[str, Mapping[str, int]]) -> None:
        """Go on from ``saved``."""
        self._seen, self._held = dict(told.get("seen", {})), dict(told.get("held", {}))

    def see(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """What to tell of this step."""
        return [
            f"step {step}: {rule.text.format(metric=name, value=value)}"
            for name, value in metrics.items()
            if (rule := _rule_of(name)) is not None
            and (not rule.beside or rule.beside in metrics)
            and self._begins(rule, step, name, value)
        ]

    def _begins(self, rule: Rule, step: int, name: str, value: float) -> bool:
        """Whether what the rule watches is to be told in this step."""
        self._seen[name] = self._seen.get(name, 0) + 1
        held = self._held[name] = self._held.get(name, 0) + 1 if rule.holds(value) else 0
        return held == rule.steps or (held == self._seen[name] < rule.steps and step == self._steps)


def _rule_of(metric: str) -> Rule | None:
    """The first rule whose name or pattern is the metric's."""
    return next((rule for rule in RULES if fnmatchcase(metric, rule.metric)), None)
