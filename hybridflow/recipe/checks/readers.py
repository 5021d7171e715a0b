"""Who reads each setting of a recipe, so that one which nothing reads is a fault.

Every key of the schema stands in one of three tables: ``READERS``, keys that some graphs read and
others do not; ``ALWAYS`` (of ``idle.py``), keys that every run with their section reads;
``ELSEWHERE``, keys of which another check says when they do nothing. A test holds the three
against the schema. Losses and functions declare
in the catalogue which keys of ``algorithm`` they read.

A role is written as its kind: ``roles.MODEL`` is the critic or a further model, ``roles.REWARD`` a
reward role.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hybridflow.recipe.catalogue import FUNCTIONS, GRAPH_INPUTS, LOSSES, VALUE_LOSSES
from hybridflow.recipe.checks.use import (
    Use,
    averages,
    estimates_kl,
    evaluation_temperature,
    falls,
    own_old,
    pays_kl,
    samples_as,
    whitens,
)
from hybridflow.recipe.plan import ACTOR


@dataclass(frozen=True)
class Reader:
    """Whether anything reads a setting.

    Attributes:
        reads: of the recipe's use and, for keys below a role, the role's name.
        nobody: why it does nothing, where nothing reads it.
        fix: how to mend that.
        relies: keys that ``reads`` looks at beside the graphs and the setting itself.
    """

    reads: Callable[[Use, str], bool]
    nobody: str
    fix: str = "remove it"
    relies: tuple[str, ...] = ()


def _declared(setting: str) -> Reader:
    """A setting of losses and functions that declare it."""
    losses = [n for n, entry in {**LOSSES, **VALUE_LOSSES}.items() if setting in entry.settings]
    functions = [name for name, known in FUNCTIONS.items() if setting in known.settings]
    assert losses or functions, f"nothing declares algorithm.{setting}"
    nobody, fixes = [], []
    if losses:
        nobody.append("no update of the dataflow has a loss of it")
        fixes.append(f"a loss that reads it: {', '.join(losses)}")
    if functions:
        nobody.append(f"the dataflow has no {' or '.join(functions)}")
        fixes.append(f"a dataflow with the function {' or '.join(functions)}")
    fix = f"remove it, or use {'; or '.join(fixes)}"
    return Reader(lambda use, _: use.reads(setting), ", and ".join(nobody), fix)


def _any_of(*settings: str) -> Reader:
    """A section that does nothing when none of its keys does anything."""
    told = [_declared(setting) for setting in settings]
    readers = {name: None for reader in told for name in [reader.nobody]}
    return Reader(
        lambda use, role: any(reader.reads(use, role) for reader in told),
        next(iter(readers)),
        told[0].fix,
    )


def _column(key: str) -> Reader:
    fields = [n for n, e in GRAPH_INPUTS.items() if e.batch == "train" and key in e.columns]
    if key == "messages_column":
        fields = [n for n, e in GRAPH_INPUTS.items() if e.batch == "train" and e.conversation]
    what = f"it is for the inputs {', '.join(fields)}, and the dataflow takes none of them"
    if key in ("prompt_column", "answer_column"):
        what = "nothing is made of it (data.messages_column, where it is set, stands for it)"
    return Reader(lambda use, _: key in use.columns(), what, relies=("data.messages_column",))


_POLICY = "no update of the dataflow has a loss with advantages"
_SAMPLED = "no update of the dataflow has a loss with advantages of responses that it samples"
_TOKENS = "no loss of the dataflow is of tokens"
_UNTRAINED = "no node of a stage that reads it updates the role"

_DATA = {
    f"data.{key}": _column(key)
    for key in (
        *("prompt_column", "answer_column", "messages_column", "chosen_column"),
        *("rejected_column", "label_column", "margin_column"),
    )
} | {
    "data.turns": Reader(
        lambda use, _: "messages_column" in use.columns(),
        "the dataflow reads no conversations",
        "remove it, or set data.messages_column",
        ("data.messages_column",),
    ),
    "data.source_column": Reader(
        lambda use, _: "answers" in use.inputs(),
        "the dataflow takes no `answers`, so nothing is scored with its row",
    ),
    "data.system": Reader(
        lambda use, _: use.recipe.data.chat is not False,
        "data.chat is false, so there is no template to put it in",
        "remove it, or data.chat",
        ("data.chat",),
    ),
    "data.max_tokens": Reader(
        lambda use, _: any(GRAPH_INPUTS[name].samples for name in use.inputs()),
        "the data of this dataflow bring no responses",
        "remove it; data.max_prompt_tokens and roles.rollout.sampling.max_tokens are the bounds",
    ),
}

_ALGORITHM = (
    {
        f"algorithm.{key}": _declared(key)
        for key in (
            *("clip", "dual_clip", "value_clip", "value_aggregation"),
            *("normalize_by_std", "gae.gamma", "gae.lam"),
            *("gae.whiten_rewards", "preference.beta", "preference.label_smoothing"),
            "preference.by_length",
            *("preference.target_margin", "preference.odds_weight", "preference.desirable_weight"),
            *("preference.undesirable_weight", "sapo", "lagrangian"),
        )
    }
    | {
        "algorithm.gae": _any_of("gae.gamma", "gae.whiten_rewards"),
        "algorithm.gae.whiten_advantages": Reader(
            lambda use, _: whitens(use),
            "every node that whitens advantages has its own `whiten`",
            "remove it, or the nodes' `whiten`",
        ),
        "algorithm.kl.coef": Reader(lambda use, _: pays_kl(use), _POLICY),
        "algorithm.kl.place": Reader(
            lambda use, _: use.recipe.algorithm.kl.coef > 0,
            "algorithm.kl.coef is 0, so there is no KL to place",
            "remove it, or set algorithm.kl.coef, such as to 0.001",
        ),
        "algorithm.kl.estimator": Reader(
            lambda use, _: estimates_kl(use),
            "there is no KL to estimate: algorithm.kl.coef is 0 or nothing reads it",
            "remove it, or set algorithm.kl.coef under a loss with advantages",
        ),
        "algorithm.kl.adaptive": Reader(lambda use, _: pays_kl(use), _POLICY),
        "algorithm.aggregation": Reader(lambda use, _: averages(use), _TOKENS),
        "algorithm.loss_divisor": Reader(lambda use, _: averages(use), _TOKENS),
        "algorithm.rollout_correction": Reader(
            lambda use, _: any(use.policy_updates(sampled=True)), _SAMPLED
        ),
        "algorithm.rollout_correction.low": Reader(
            lambda use, _: use.recipe.algorithm.rollout_correction.method != "truncated",  # pyright: ignore
            "`truncated` has an upper bound only",
            "remove it, or use `masked` or `rejection`",
        ),
        "algorithm.off_policy_mask": Reader(
            lambda use, _: any(use.policy_updates(sampled=True)), _SAMPLED
        ),
        "algorithm.agreement.threshold": Reader(
            lambda use, _: any(
                "rollout_logprobs" in node.inputs for node in use.token_losses("update")
            ),
            "no update of the dataflow takes `rollout_logprobs`",
        ),
        "algorithm.agreement.bound": Reader(
            lambda use, _: any(use.policy_updates(sampled=True)), _SAMPLED
        ),
        "algorithm.agreement.old_bound": Reader(
            lambda use, _: own_old(use),
            "no update gets `old_logprobs` that its own role computed in the step",
        ),
    }
    | {
        f"algorithm.{key}": Reader(lambda use, _: any(use.policy_updates(sampled=True)), _SAMPLED)
        for key in ("entropy", "entropy_coef")
    }
)

_OPTIMIZER = ("betas", "eps", "weight_decay", "clip_grad", "schedule", "warmup_steps")
_FLAT = "the schedule is constant"
_ROLES = (
    {
        f"roles.{kind}": Reader(
            lambda use, role: use.names(role),
            "no node of the dataflow acts on the role",
            "remove it, or give it a node",
        )
        for kind in ("actor", "reference", "rollout", "MODEL", "REWARD")
    }
    | {
        f"roles.{kind}.{key}": Reader(lambda use, role: use.trains(role), _UNTRAINED)
        for kind in ("actor", "MODEL")
        for key in ("mini_batches", "epochs", *(f"optimizer.{name}" for name in _OPTIMIZER))
    }
    | {
        f"{section}.min_lr": Reader(
            falls, _FLAT, f"remove it, or set {section.replace('MODEL', 'NAME')}.schedule"
        )
        for section in ("warm_start", "roles.actor.optimizer", "roles.MODEL.optimizer")
    }
    | {
        "roles.MODEL.optimizer": Reader(
            lambda use, role: use.trains(role) or role == "critic",  # which needs one
            _UNTRAINED,
            "remove it: without an optimizer the role is frozen",
        ),
        "roles.rollout.python": Reader(
            lambda use, _: use.recipe.roles.servers.engine == "sglang",
            "the local engine runs in the driver's own environment",
            "remove it, or set roles.rollout.engine to sglang",
        ),
    }
)

READERS: dict[str, Reader] = (
    _DATA
    | _ALGORITHM
    | _ROLES
    | {
        "cluster.peak_tflops": Reader(
            lambda use, _: any(ACTOR in stage.trained for stage in use.plan.stages),
            "the figure it is for is of the actor's updates, and there are none",
        ),
        "evaluation.samples_per_prompt": Reader(
            lambda use, _: samples_as(use, "evaluation") and evaluation_temperature(use) > 0,
            "no node samples held-out prompts, or evaluation.temperature is 0 and all samples of a "
            "prompt are the same",
            "remove it, or set evaluation.temperature",
            ("evaluation.temperature",),
        ),
        "evaluation.temperature": Reader(
            lambda use, _: samples_as(use, "evaluation"), "no node samples held-out prompts"
        ),
        "checkpoint.keep": Reader(
            lambda use, _: use.recipe.checkpoint.every is not None,
            "checkpoint.every is null, so there are no checkpoints",
            "remove it, or set checkpoint.every",
            ("checkpoint.every",),
        ),
    }
)
