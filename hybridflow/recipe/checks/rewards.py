"""Rewards that can be found without importing them, and what they are told."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridflow.recipe.catalogue import REWARDS
from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.checks.model import has_separate_head
from hybridflow.recipe.checks.reward_code import own_reward_faults
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.graph import Node
from hybridflow.recipe.names import hint
from hybridflow.recipe.schema_rewards import FunctionSection, RewardSection


def reward_faults(context: Context) -> Iterator[Fault]:
    """Unknown reward functions, and parameters that they do not take."""
    for role, section in context.recipe.roles.rewards().items():
        if not context.trusts(f"roles.{role}"):
            continue
        yield from _level_faults(context, role, section)
        yield from _deadline_faults(context, role, section)
        yield from _worker_faults(context, role, section)
        for key, part in section.parts(role).values():
            yield from _function_faults(context, f"roles.{role}{key}", part)
            if part.function not in REWARDS:  # those of the package have rules of their own
                yield from _json_faults(context, f"roles.{role}{key}", part)
            if section.policy(part) == "group_mean" and _scores_single_samples(context, role):
                what = (
                    "on_error: group_mean is of a prompt's other samples, and there is one of each"
                )
                where = f"roles.{role}{key if part.on_error else ''}.on_error"
                yield context.fault(where, what, "use fail or `{value: 0.0}`")


def _scores_single_samples(context: Context, role: str) -> bool:
    """Whether the role scores training responses that are the only ones of their prompts, such as
    ReMax's greedy baseline."""
    if context.recipe.data.samples_per_prompt == 1:
        return True
    for stage in context.stages:
        scoring = [n for n in stage.graph.nodes if (n.role, n.call) == (role, "score")]
        makers = [stage.graph.producers.get(n.inputs.get("responses", "")) for n in scoring]
        if any(maker and maker.options.get("sampling") == "greedy" for maker in makers):
            return True
    return False


def _json_faults(context: Context, key: str, part: FunctionSection) -> Iterator[Fault]:
    """Parameters that neither a checkpoint nor the control port could tell."""
    for name, value in part.parameters.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            where = f"{key}.parameters.{name}"
            what = f"`{where}` is {value!r}, for which JSON has no form"
            yield context.fault(where, what, "write a finite number, or a text in quotes")


def _level_faults(context: Context, role: str, section: RewardSection) -> Iterator[Fault]:
    if section.level == "sequence":
        return
    for key, part in section.parts(role).values():
        if part.function in REWARDS and not REWARDS[part.function].token_level:
            what = f"the reward '{part.function}' scores whole responses, not tokens"
            fix = f"set roles.{role}.level to sequence, or use a function of your own"
            yield context.fault(f"roles.{role}{key}.function", what, fix)
        if section.policy(part) == "group_mean":
            what = "on_error: group_mean is of whole responses; tokens have no counterpart"
            where = f"roles.{role}{key if part.on_error else ''}.on_error"
            yield context.fault(where, what, "use fail or `{value: 0.0}`")


def _deadline_faults(context: Context, role: str, section: RewardSection) -> Iterator[Fault]:
    """Deadlines within which nothing can happen."""
    sample, step = section.sample_timeout_seconds, section.timeout_seconds
    if sample > step:
        what = f"a sample may take {sample:g} s, but a step's scoring ends after {step:g} s"
        fix = f"set roles.{role}.timeout_seconds to at least {sample:g}, better to several times it"
        yield context.fault(f"roles.{role}.sample_timeout_seconds", what, fix)
    for key, part in section.parts(role).values():
        told = part.parameters.get("timeout_seconds")
        retries = part.parameters.get("retries", 2)
        if part.function != "http" or not isinstance(told, int | float) or not retries:
            continue
        if told >= sample:
            what = f"a try may take {told:g} s and a sample {sample:g} s: there is no second try"
            fix = f"raise roles.{role}.sample_timeout_seconds, or set retries to 0"
            yield context.fault(f"roles.{role}{key}.parameters.timeout_seconds", what, fix)


def _worker_faults(context: Context, role: str, section: RewardSection) -> Iterator[Fault]:
    """More processes than prompts, over which the samples are spread."""
    recipe = context.recipe
    held_out = recipe.evaluation is not None and recipe.evaluation.prompts
    most = max(recipe.data.prompts_per_step, held_out or 0)
    every = recipe.evaluation is not None and recipe.evaluation.prompts is None
    if section.workers > most and not every:
        what = f"roles.{role}.workers={section.workers} share {most} prompts: some have nothing"
        yield context.fault(f"roles.{role}.workers", what, f"set it to at most {most}")


def _header_faults(context: Context, key: str, part: FunctionSection) -> Iterator[Fault]:
    told = part.parameters
    named = [name for name in told.get("headers") or {} if str(name).lower() == "authorization"]
    if named and told.get("token_env"):
        what = f"the header {named[0]} and `token_env` both say who asks"
        yield context.fault(f"{key}.parameters.headers", what, "keep one of the two")


def _function_faults(context: Context, key: str, part: FunctionSection) -> Iterator[Fault]:
    where, name = f"{key}.function", part.function
    if name in REWARDS:
        yield from _parameter_faults(context, key, part)
    elif ":" in name or "." in name:
        yield from own_reward_faults(context, key, part)
    else:
        fix = f"{REWARDS.advice(name)}. Your own is 'pkg.mod.fn' or 'file.py:fn'"
        yield context.fault(where, f"unknown reward '{name}'", fix)


def _parameter_faults(context: Context, key: str, part: FunctionSection) -> Iterator[Fault]:
    known = REWARDS[part.function].parameters
    if REWARDS[part.function].from_python:
        return
    for name, value in part.parameters.items():
        where = f"{key}.parameters.{name}"
        if name not in known:
            what = f"the reward '{part.function}' has no parameter '{name}'"
            yield context.fault(where, what, hint(name, known))
        elif problem := known[name].problem(value):
            fix = f"{name}: {known[name].description}"
            yield context.fault(where, f"`{where}` {problem}", fix)
    for name, option in known.items():
        if option.required and name not in part.parameters:
            what = f"the reward '{part.function}' needs the parameter '{name}'"
            fix = f"add `parameters: {{{name}: ...}}` ({option.description})"
            yield context.fault(key, what, fix)
    if REWARDS.canonical(part.function) == "http" and isinstance(
        part.parameters.get("headers"), dict
    ):
        yield from _header_faults(context, key, part)


def model_faults(context: Context) -> Iterator[Fault]:
    """Reward models without a trained head, or with too small packs."""
    recipe = context.recipe
    kinds = recipe.roles.kinds()
    nodes = [node for stage in context.stages for node in stage.graph.nodes]
    scoring = {str(n.role) for n in nodes if n.call == "score"}
    for role in sorted(role for role in scoring if kinds.get(role) == "value"):
        if not context.trusts(f"roles.{role}"):
            continue
        yield from _head_faults(context, role)
        yield from _pooling_faults(context, role, [n for n in nodes if n.role == role])
        section = recipe.roles.models()[role]
        told = recipe.roles.rollout
        longest = recipe.data.max_prompt_tokens + 1 + (told.sampling.max_tokens if told else 0)
        if section.micro_batch_tokens < longest:
            key = f"roles.{role}.micro_batch_tokens"
            what = f"{key}={section.micro_batch_tokens} cannot hold the longest sample and its end"
            yield context.fault(key, what, f"set it to at least {longest}")


def _pooling_faults(context: Context, role: str, nodes: list[Node]) -> Iterator[Fault]:
    """A model of which the graph does not say what a response's score is: one of token scores, or
    one whose padding is the end token."""
    path = Path(context.recipe.model_path(role))
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        names = " ".join(config["architectures"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if "ForTokenClassification" in names:
        what = "whose scores are of tokens"
        fix = "say which is a response's: `pooling: mean` (bradley_terry_token), or `pooling: last`"
    elif "ForSequenceClassification" in names and _pads_with_the_end(config):
        what = "whose padding is its end token: transformers reads the value before the end"
        fix = "say which is a response's: `pooling: before_padding`, as transformers, or "
        fix += "`pooling: last`; or let config.json have no pad_token_id"
    else:
        return
    for node in (node for node in nodes if node.call == "score" and "pooling" not in node.options):
        yield Fault(node.origin, f"node '{node.name}' scores with {path}, {what}", fix)


def _pads_with_the_end(config: dict[str, Any]) -> bool:
    ends, pad = config.get("eos_token_id"), config.get("pad_token_id")
    return pad is not None and pad in (ends if isinstance(ends, list) else [ends])


def _head_faults(context: Context, role: str) -> Iterator[Fault]:
    from megatron_bridge.registry import has_value_head

    path = Path(context.recipe.model_path(role))
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = None
    key, fix = f"roles.{role}.model", "give the folder of a *ForSequenceClassification"
    if isinstance(config, dict) and not has_value_head(config) and not has_separate_head(path):
        what = f"{path} has no trained head, so its scores would be random"
        yield context.fault(key, what, fix)


CHECKS = (
    Check(("dataflow", "warm_start.dataflow", "roles.*", "data", "roles.rollout"), model_faults),
    Check((), reward_faults),
)
