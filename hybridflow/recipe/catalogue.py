"""What a dataflow may be made of: calls, functions, losses, rewards, conditions. No torch.

A test binds every entry to its implementation, so this table and the code cannot drift apart.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hybridflow.recipe.axes import Axis, FieldType
from hybridflow.recipe.catalogue_fields import (
    ADVANTAGES,
    ANSWERS,
    FINISHED,
    HIDDEN,
    KL_BASELINE,
    LABELS,
    LOGPROBS,
    MARGINS,
    PAIRS,
    PROMPTS,
    RESPONSE_MASK,
    RESPONSES,
    RETURNS,
    REWARD_VALUES,
    SAMPLE_MASK,
    TARGET_MASK,
    TARGETS,
    TOKEN_ADVANTAGES,
    TOKEN_REWARDS,
    TOKEN_VERSIONS,
    VALUES,
    field_type,
    takes,
)
from hybridflow.recipe.catalogue_functions import FUNCTIONS
from hybridflow.recipe.catalogue_losses import AGGREGATIONS as AGGREGATIONS
from hybridflow.recipe.catalogue_losses import EVALUATED, LOSSES, SCORE_LOSSES, VALUE_LOSSES
from hybridflow.recipe.catalogue_losses import KL_ESTIMATORS as KL_ESTIMATORS
from hybridflow.recipe.catalogue_rewards import REWARDS as REWARDS
from hybridflow.recipe.signature import Option, RoleKind, Signature


@dataclass(frozen=True)
class GraphInput:
    """A field that the data gives.

    Attributes:
        columns: keys of the recipe's ``data`` section that name the columns it is made of.
        conversation: whether ``data.messages_column``, where it is set, stands for these columns.
        samples: responses of a prompt that the data itself brings; None for fields without any.
        batch: tells training rows from evaluation rows.
    """

    type: FieldType
    columns: tuple[str, ...]
    conversation: bool = False
    samples: int | None = None
    batch: Literal["train", "eval"] = "train"


_ANSWERED = ("prompt_column", "answer_column")
_ROW_INPUTS: dict[str, GraphInput] = {
    "prompts": GraphInput(PROMPTS, ("prompt_column",), conversation=True),
    "answers": GraphInput(ANSWERS, ("answer_column",)),
    "targets": GraphInput(TARGETS, _ANSWERED, conversation=True, samples=1),
    "target_mask": GraphInput(TARGET_MASK, _ANSWERED, conversation=True, samples=1),
    "pairs": GraphInput(PAIRS, ("prompt_column", "chosen_column", "rejected_column"), samples=2),
    "labels": GraphInput(LABELS, ("label_column",), samples=1),
    "margins": GraphInput(MARGINS, ("margin_column",)),
}
GRAPH_INPUTS: dict[str, GraphInput] = _ROW_INPUTS | {
    f"eval_{name}": replace(entry, batch="eval") for name, entry in _ROW_INPUTS.items()
}


def column_keys(inputs: Iterable[str], conversations: bool) -> tuple[str, ...]:
    """Keys of the ``data`` section whose columns rows must have for these graph inputs.

    Args:
        conversations: whether ``data.messages_column`` is set.
    """
    entries = [GRAPH_INPUTS[name] for name in inputs]
    pairs = any(entry.samples == 2 for entry in entries)  # whose prompts have their own column
    keys: dict[str, None] = {}
    for entry in entries:
        from_messages = conversations and entry.conversation and not pairs
        keys |= dict.fromkeys(("messages_column",) if from_messages else entry.columns)
    return tuple(keys)


_SCORES = {
    "rewards": REWARD_VALUES,
    "token_rewards": replace(
        TOKEN_REWARDS,
        description="reward of each response token, 0 at special tokens such as the end; absent "
        "unless the role has functions and its level is token",
    ),
}
CALLS: dict[tuple[RoleKind, str], Signature] = {
    ("rollout", "generate"): Signature(
        "Sample responses to every prompt.",
        {"prompts": takes(PROMPTS)},
        {
            "responses": RESPONSES,
            "rollout_logprobs": replace(
                LOGPROBS,
                description="log-probability of each token when it was sampled, in nats",
            ),
            "finished": FINISHED,
            "versions": field_type(
                Axis.SAMPLES, "int", "weight version of the response's last token"
            ),
            "token_versions": TOKEN_VERSIONS,
        },
        {
            "sampling": Option(
                "str",
                "training",
                choices=("training", "evaluation", "greedy"),
                description="take samples per prompt and temperature from data and "
                "roles.rollout.sampling, or from evaluation; or the likeliest tokens, once",
            )
        },
    ),
    ("reward", "score"): Signature(
        "Score every response with the role's functions.",
        {
            "prompts": takes(PROMPTS),
            "answers": takes(ANSWERS),
            "responses": takes(RESPONSES),
        },
        _SCORES,
    ),
    ("model", "logprobs"): Signature(
        "Log-probability of every response token under the role's weights.",
        {"prompts": takes(PROMPTS), "responses": takes(RESPONSES)},
        {"logprobs": LOGPROBS},
    ),
    ("model", "hidden"): Signature(
        "Final hidden state of the role's model before every response token, as many values as the "
        "model is wide.",
        {"prompts": takes(PROMPTS), "responses": takes(RESPONSES)},
        {"hidden": HIDDEN},
    ),
    ("model", "update"): Signature(
        "Take the optimizer steps of one training step: epochs x mini-batches.",
        {
            "prompts": takes(PROMPTS),
            "responses": takes(RESPONSES),
            "response_mask": takes(RESPONSE_MASK, optional=True),
            "labels": takes(LABELS, optional=True),
            "kl_baseline": takes(KL_BASELINE, optional=True),
            "rollout_logprobs": takes(
                LOGPROBS,
                optional=True,
                description="log-probabilities when sampled: measures the mismatch of the engines",
            ),
            "token_versions": takes(
                TOKEN_VERSIONS,
                optional=True,
                description="refuses samples that are older than roles.rollout.max_staleness",
            ),
            "old_logprobs": takes(
                LOGPROBS,
                optional=True,
                description="log-probabilities before the update; needed when it is off-policy",
            ),
            "ref_logprobs": takes(
                LOGPROBS, optional=True, description="log-probabilities under the reference"
            ),
            "ref_hidden": takes(
                HIDDEN,
                optional=True,
                description="hidden states of the reference, for algorithm.kl.estimator=full",
            ),
            "advantages": takes(
                *(ADVANTAGES, TOKEN_ADVANTAGES, REWARD_VALUES),
                optional=True,
                description="advantage of each response or token; a response's reward is the "
                "plainest",
            ),
            "sample_mask": takes(
                SAMPLE_MASK,
                optional=True,
                description="responses that take part in the loss, such as `finished`",
            ),
        },
        {"metrics": field_type(Axis.RUN, "object", "what the step measured, by name")},
        {"loss": Option("str", required=True, choices=LOSSES, description="the loss to minimise")},
        trainable=True,
    ),
    ("model", "evaluate"): Signature(
        "The loss and its metrics on rows that are not trained on.",
        {
            "prompts": takes(PROMPTS),
            "responses": takes(RESPONSES),
            "response_mask": takes(RESPONSE_MASK, optional=True),
            "ref_logprobs": takes(
                LOGPROBS, optional=True, description="log-probabilities under the reference"
            ),
            "labels": takes(LABELS, optional=True),
            "kl_baseline": takes(KL_BASELINE, optional=True),
        },
        {"metrics": field_type(Axis.RUN, "object", "what was measured, by name")},
        {"loss": Option("str", required=True, choices=EVALUATED, description="the loss to report")},
    ),
    ("value", "values"): Signature(
        "Value of the state before every response token under the role's weights.",
        {"prompts": takes(PROMPTS), "responses": takes(RESPONSES)},
        {"values": VALUES},
    ),
    ("value", "score"): Signature(
        "Score every response with a reward model.",
        {
            "prompts": takes(PROMPTS),
            "answers": takes(
                ANSWERS, optional=True, description="not read: a graph fits functions and models"
            ),
            "responses": takes(RESPONSES),
        },
        _SCORES,
        {
            "pooling": Option(
                "str",
                "last",
                choices=("last", "mean", "before_padding"),
                description="the value after the last token; the mean of those after each "
                "token, as the loss bradley_terry_token trains it; or the value after the last "
                "token that is no padding, as transformers reads models whose padding is the end",
            )
        },
    ),
    ("value", "update"): Signature(
        "Take the optimizer steps of one training step: epochs x mini-batches.",
        {
            "prompts": takes(PROMPTS),
            "responses": takes(RESPONSES),
            "values": takes(VALUES, optional=True, description="values before the update"),
            "returns": takes(RETURNS, optional=True),
            "margins": takes(MARGINS, optional=True),
        },
        {"metrics": field_type(Axis.RUN, "object", "what the step measured, by name")},
        {
            "loss": Option(
                "str",
                required=True,
                choices=(*VALUE_LOSSES, *SCORE_LOSSES),
                description="the loss to minimise",
            )
        },
        trainable=True,
    ),
    ("value", "evaluate"): Signature(
        "The loss of a reward model on pairs that are not trained on.",
        {
            "prompts": takes(PROMPTS),
            "responses": takes(RESPONSES),
            "margins": takes(MARGINS, optional=True),
        },
        {"metrics": field_type(Axis.RUN, "object", "what was measured, by name")},
        {
            "loss": Option(
                "str",
                required=True,
                choices=tuple(SCORE_LOSSES),
                description="the loss to report",
            )
        },
    ),
    ("model", "publish"): Signature(
        "Stream the weights into the rollout role named by `to` and prove them by checksum.",
        {},
        {"weight_version": field_type(Axis.RUN, "int", "version that the servers now hold")},
        trainable=True,
    ),
    ("model", "save"): Signature(
        "Write a checkpoint of every trained model, from which the run can go on.",
        {},
        {"checkpoint": field_type(Axis.RUN, "object", "folder of the checkpoint")},
        trainable=True,
    ),
}
CALLS["value", "save"] = CALLS["model", "save"]

CONDITIONS: dict[str, str] = {
    "rollout": "the recipe has roles.rollout",
    "off_policy": "the update looks back at the policy before it: mini_batches * epochs > 1, or "
    "algorithm.rollout_correction",
    "kl": "algorithm.kl.coef > 0",
    "old_logprobs": "off_policy, or algorithm.kl.place is reward and its coef > 0",
    "actor_trains": "not in the first algorithm.critic_warmup_steps steps",
}

SECTIONS: dict[str, str] = {
    "evaluation": "every evaluation.every steps; off without an evaluation section",
    "checkpoint": "every checkpoint.every steps; off when that is not set",
    "end": "the last step of a stage only",
}


def signature(kind: RoleKind | None, name: str | None) -> Signature | None:
    """Signature of a role's call, or of a function when ``kind`` is None."""
    if name is None:
        return None
    return FUNCTIONS.get(name) if kind is None else CALLS.get((kind, name))


def calls_of(kind: RoleKind) -> list[str]:
    """Names of the calls that a kind of role offers."""
    return [call for role_kind, call in CALLS if role_kind == kind]
