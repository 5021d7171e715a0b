"""Settings that nothing reads under the recipe's graphs."""

from collections.abc import Iterator

from hybridflow.recipe.catalogue import FUNCTIONS, LOSSES, SCORE_LOSSES, VALUE_LOSSES
from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.checks.readers import READERS
from hybridflow.recipe.checks.use import Use
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.names import nearest
from hybridflow.recipe.schema_roles import RolesSection
from hybridflow.recipe.section import Section

_OWN = ("actor", "reference", "rollout")
"""Roles whose sections are of their own kind."""

_CUT = ("tp", "pp", "dp", "ep", "etp", "first_stage_layers", "last_stage_layers")
_MODEL = ("micro_batch_tokens", *(f"parallel.{key}" for key in _CUT))
_RATE = ("lr", "betas", "eps", "weight_decay", "clip_grad", "schedule", "warmup_steps")

ALWAYS: dict[str, tuple[str, ...]] = {
    "": ("name", "seed", "output", "imports", "steps", "dataflow", "export"),
    "model": ("path", "dtype"),
    "cluster": ("nodes", "devices_per_node"),
    "data": (
        *("train", "eval", "chat", "max_prompt_tokens", "shuffle", "prompts_per_step"),
        "samples_per_prompt",
    ),
    "warm_start": ("dataflow", "train", "steps", "prompts_per_step", *_RATE),
    "control": ("host", "port", "token_env", "stall_seconds"),
    "evaluation": ("prompts",),
    "roles.actor": (*_MODEL, "optimizer.lr"),
    "roles.reference": (*_MODEL, "model", "colocate"),
    "roles.MODEL": (*_MODEL, "head", "model", "colocate", "optimizer.lr"),
    "roles.rollout": (
        *("engine", "threads", "max_running_requests", "start_timeout_seconds"),
        *("request_timeout_seconds", "colocate", "max_staleness", "repair_seconds"),
        *("parallel.tp", "parallel.dp", "parallel.ep", "sampling.temperature", "sampling.top_p"),
        *("sampling.top_k", "sampling.max_tokens", "sync.transport", "sync.pause"),
        *("sync.timeout_seconds", "sync.directory"),
    ),
    "roles.REWARD": (
        *("function", "parameters", "on_error", "max_failed_share", "workers"),
        *("sample_timeout_seconds", "timeout_seconds", "start_timeout_seconds", "memory_gib"),
        *(f"functions.NAME.{key}" for key in ("function", "parameters", "weight", "on_error")),
    ),
    "algorithm.sapo": ("tau_positive", "tau_negative"),
    "algorithm.lagrangian": ("limit", "start", "lr", "maximum"),
    "algorithm.kl.adaptive": ("target", "horizon"),
    "algorithm.rollout_correction": ("method", "level", "high"),
    "algorithm.off_policy_mask": ("bound",),
}
"""Keys that a run reads in any case, where it has their section and role: by the section."""

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "algorithm": ("critic_warmup_steps",),
    "evaluation": ("every",),
    "checkpoint": ("every",),
    "roles.rollout.sync": ("mode", "bucket", "full_every"),
    "roles.REWARD": ("level",),
}
"""Keys of which ``dataflow``, ``sync`` and ``rewards`` say when they do nothing."""


def idle_faults(context: Context) -> Iterator[Fault]:
    """Settings whose value is not the default, and that nothing reads."""
    if not context.has_main:
        return
    yield from _Idle(context).of(context.recipe, "", "", "")


class _Idle:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._use = Use(context.plan)
        nodes = [node for _, node in self._use.nodes()]
        known = {*LOSSES, *VALUE_LOSSES, *SCORE_LOSSES}
        self._unread = any(
            node.function not in (None, *FUNCTIONS)
            or node.options.get("loss") not in (None, *known)
            for node in nodes
        )
        self._lacking = {r for n in nodes for r in n.roles} - context.recipe.roles.kinds().keys()

    def of(self, section: Section, key: str, kind: str, role: str) -> Iterator[Fault]:
        """Faults of a section's keys.

        Args:
            key, kind: of the section, as the recipe and as the tables have it.
            role: the role that it is a part of, or empty.
        """
        if isinstance(section, RolesSection):
            yield from self._of_roles(section)
            return
        for name, info in type(section).model_fields.items():
            value = getattr(section, name)
            if value == info.default:  # which a run's folder writes out, too
                continue
            below, pattern = f"{key}.{name}".lstrip("."), f"{kind}.{name}".lstrip(".")
            if fault := self._fault(below, pattern, role):
                yield fault
            elif isinstance(value, Section):
                yield from self.of(value, below, pattern, role)

    def _of_roles(self, roles: RolesSection) -> Iterator[Fault]:
        sections = {**roles.models(), **roles.rewards()}
        if roles.rollout is not None:
            sections["rollout"] = roles.rollout
        for role, section in sections.items():
            kind = role if role in _OWN else "MODEL"
            if role in roles.rewards():
                kind = "REWARD"
            key, pattern = f"roles.{role}", f"roles.{kind}"
            if fault := self._fault(key, pattern, role):
                yield fault
            elif role in self._use.plan.roles:
                yield from self.of(section, key, pattern, role)

    def _fault(self, key: str, pattern: str, role: str) -> Fault | None:
        reader = READERS.get(pattern)
        if reader is None or not all(map(self._context.trusts, (key, *reader.relies))):
            return None
        if reader.reads(self._use, role) or self._is_misread(key, role):
            return None
        return self._context.fault(key, f"{key} does nothing: {reader.nobody}", reader.fix)

    def _is_misread(self, key: str, role: str) -> bool:
        """Whether it is a misspelt name in a graph, a fault by itself, that leaves a key idle."""
        if key == f"roles.{role}":
            return any(nearest(name, [role]) for name in self._lacking)
        return self._unread and key.startswith("algorithm.")


GRAPHS = (
    *("dataflow", "warm_start.dataflow", "roles.*", "algorithm.kl", "algorithm.rollout_correction"),
    *("algorithm.critic_warmup_steps", "roles.actor.mini_batches", "roles.actor.epochs"),
    *("evaluation.every", "checkpoint.every"),
)
"""What says which nodes are on."""

CHECKS = (Check(GRAPHS, idle_faults),)
