"""What a dataflow may be made of: calls, functions, losses, rewards, conditions. No torch.

A test binds every entry to its implementation, so this table and the code cannot drift apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hybridflow.recipe.axes import Axis, Dtype, FieldType
from hybridflow.recipe.signature import Input, Option, RoleKind, Signature


@dataclass(frozen=True)
class LossEntry:
    """A loss of the update call: the optional inputs that it needs or may use."""

    description: str
    needs: tuple[str, ...] = ()
    compares_policies: bool = False


@dataclass(frozen=True)
class RewardEntry:
    """A reward that ships with the package; it reads the row's answer column."""

    description: str
    parameters: Mapping[str, Option] = field(default_factory=dict)


@dataclass(frozen=True)
class GraphInput:
    """A field that the data gives; ``batch`` tells training rows from evaluation rows."""

    type: FieldType
    batch: Literal["train", "eval"]


def _type(axis: Axis, dtype: Dtype, description: str = "") -> FieldType:
    return FieldType(axis, dtype, description)


def _input(*types: FieldType, optional: bool = False, description: str = "") -> Input:
    return Input(types, optional, description or types[0].description)


PROMPTS = _type(Axis.PROMPTS, "ids", "token ids of each prompt")
ANSWERS = _type(Axis.PROMPTS, "object", "the data's row of each prompt, with its answer")
TARGETS = _type(Axis.PROMPTS, "ids", "token ids of each prompt's answer, end of sequence included")
RESPONSES = _type(Axis.TOKENS, "int", "token ids of each response")
LOGPROBS = _type(Axis.TOKENS, "float", "log-probability of each response token, in nats")
REWARD_VALUES = _type(Axis.SAMPLES, "float", "reward of each response")
ADVANTAGES = _type(Axis.SAMPLES, "float", "advantage of each response")
TOKEN_ADVANTAGES = _type(Axis.TOKENS, "float", "advantage of each response token")

GRAPH_INPUTS: dict[str, GraphInput] = {
    "prompts": GraphInput(PROMPTS, "train"),
    "answers": GraphInput(ANSWERS, "train"),
    "targets": GraphInput(TARGETS, "train"),
    "eval_prompts": GraphInput(PROMPTS, "eval"),
    "eval_answers": GraphInput(ANSWERS, "eval"),
}

LOSSES: dict[str, LossEntry] = {
    "ppo_clip": LossEntry(
        "PPO's clipped surrogate; bounds from algorithm.clip", ("advantages",), True
    ),
    "cross_entropy": LossEntry("negative log-likelihood of the responses (supervised)"),
}

TOKEN_VERSIONS = _type(Axis.TOKENS, "int", "weight version that each token was sampled from")

CALLS: dict[tuple[RoleKind, str], Signature] = {
    ("rollout", "generate"): Signature(
        "Sample responses to every prompt.",
        {"prompts": _input(PROMPTS)},
        {
            "responses": RESPONSES,
            "rollout_logprobs": _type(
                Axis.TOKENS, "float", "log-probability of each token when it was sampled, in nats"
            ),
            "finished": _type(Axis.SAMPLES, "bool", "whether the response ended on its own"),
            "versions": _type(Axis.SAMPLES, "int", "weight version of the response's last token"),
            "token_versions": TOKEN_VERSIONS,
        },
        {
            "sampling": Option(
                "str",
                "training",
                choices=("training", "evaluation"),
                description="take samples per prompt and temperature from data and "
                "roles.rollout.sampling, or from evaluation",
            )
        },
    ),
    ("reward", "score"): Signature(
        "Score every response with the role's function.",
        {
            "prompts": _input(PROMPTS),
            "answers": _input(ANSWERS),
            "responses": _input(RESPONSES),
        },
        {"rewards": REWARD_VALUES},
    ),
    ("model", "logprobs"): Signature(
        "Log-probability of every response token under the role's weights.",
        {"prompts": _input(PROMPTS), "responses": _input(RESPONSES)},
        {"logprobs": LOGPROBS},
    ),
    ("model", "update"): Signature(
        "Take the optimizer steps of one training step: epochs x mini-batches.",
        {
            "prompts": _input(PROMPTS),
            "responses": _input(RESPONSES, TARGETS),
            "rollout_logprobs": _input(
                LOGPROBS,
                optional=True,
                description="log-probabilities when sampled: measures the mismatch of the engines",
            ),
            "token_versions": _input(
                TOKEN_VERSIONS,
                optional=True,
                description="refuses samples that are older than roles.rollout.max_staleness",
            ),
            "old_logprobs": _input(
                LOGPROBS,
                optional=True,
                description="log-probabilities before the update; needed when it is off-policy",
            ),
            "ref_logprobs": _input(
                LOGPROBS, optional=True, description="log-probabilities under the reference"
            ),
            "advantages": _input(ADVANTAGES, TOKEN_ADVANTAGES, optional=True),
        },
        {"metrics": _type(Axis.RUN, "object", "what the step measured, by name")},
        {
            "loss": Option(
                "str", required=True, choices=tuple(LOSSES), description="the loss to minimise"
            )
        },
        trainable=True,
    ),
    ("model", "publish"): Signature(
        "Stream the weights into the rollout role named by `to` and prove them by checksum.",
        {},
        {"weight_version": _type(Axis.RUN, "int", "version that the servers now hold")},
        trainable=True,
    ),
    ("model", "save"): Signature(
        "Write a checkpoint from which the run can go on.",
        {},
        {"checkpoint": _type(Axis.RUN, "object", "folder of the checkpoint")},
        trainable=True,
    ),
}

FUNCTIONS: dict[str, Signature] = {
    "group_relative": Signature(
        "GRPO's advantage: reward minus the mean of the prompt's samples, divided by their "
        "standard deviation when algorithm.normalize_by_std is set.",
        {"rewards": _input(REWARD_VALUES)},
        {"advantages": ADVANTAGES},
    ),
    "shuffle": Signature(
        "Permute the values over all samples of the step: a control that must not learn.",
        {"values": _input(_type(Axis.SAMPLES, "float", "values to permute"))},
        {"shuffled": _type(Axis.SAMPLES, "float", "the same values on other samples")},
        {"seed": Option("int", 0, description="seed of the permutations")},
    ),
    "weighted_sum": Signature(
        "Combine two values of each sample: weights[0] * first + weights[1] * second.",
        {
            "first": _input(_type(Axis.SAMPLES, "float", "first value of each sample")),
            "second": _input(_type(Axis.SAMPLES, "float", "second value of each sample")),
        },
        {"total": _type(Axis.SAMPLES, "float", "weighted sum of each sample")},
        {"weights": Option("list of float", [1.0, 1.0], description="two weights")},
    ),
    "accumulate_signal": Signature(
        "Keep the prompts whose samples have different rewards, over the rounds of a "
        "`repeat_until`, until the step's number of prompts is reached (DAPO).",
        {
            "prompts": _input(PROMPTS),
            "responses": _input(RESPONSES),
            "rollout_logprobs": _input(LOGPROBS),
            "rewards": _input(REWARD_VALUES),
        },
        {
            "kept_prompts": PROMPTS,
            "kept_responses": RESPONSES,
            "kept_rollout_logprobs": LOGPROBS,
            "kept_rewards": REWARD_VALUES,
            "enough": _type(Axis.RUN, "bool", "whether enough prompts were kept"),
        },
        fresh_batch=True,
    ),
}

CONDITIONS: dict[str, str] = {
    "off_policy": "the update takes more than one optimizer step: mini_batches * epochs > 1",
    "kl": "algorithm.kl.coef > 0",
}

SECTIONS: dict[str, str] = {
    "evaluation": "every evaluation.every steps; off without an evaluation section",
    "checkpoint": "every checkpoint.every steps; off when that is not set",
    "end": "the last step of a stage only",
}

REWARDS: dict[str, RewardEntry] = {
    "exact_match": RewardEntry(
        "1 when the response is the answer, letter for letter",
        {"strip": Option("bool", True, description="ignore white space at both ends")},
    ),
    "format_regex": RewardEntry(
        "1 when a regular expression matches the whole response",
        {"pattern": Option("str", required=True, description="a Python regular expression")},
    ),
    "length": RewardEntry(
        "1 up to a number of characters, then falling to 0",
        {
            "budget": Option("int", required=True, description="characters that cost nothing"),
            "slack": Option("int", 0, description="characters over which the reward falls to 0"),
        },
    ),
    "number_match": RewardEntry(
        "1 when the last number of the response is that of the answer",
        {"tolerance": Option("float", 0.0, description="largest difference that is equal")},
    ),
    "reasoning_gym": RewardEntry(
        "the score of reasoning-gym's own scorer for the row's task",
        {"tag": Option("str", description="score only what stands within the last `<tag>`")},
    ),
}


def signature(kind: RoleKind | None, name: str | None) -> Signature | None:
    """Signature of a role's call, or of a function when ``kind`` is None."""
    if name is None:
        return None
    return FUNCTIONS.get(name) if kind is None else CALLS.get((kind, name))


def calls_of(kind: RoleKind) -> list[str]:
    """Names of the calls that a kind of role offers."""
    return [call for role_kind, call in CALLS if role_kind == kind]
