"""Models beside the actor: whose devices they share, and folders of their own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridflow.recipe.checks.context import Check, Context, missing_sizes
from hybridflow.recipe.checks.model import is_known
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.names import hint


def host_faults(context: Context) -> Iterator[Fault]:
    """`colocate` with a role that has no devices, or round in a circle."""
    asked = context.recipe.roles.hosts()
    kinds = context.recipe.roles.kinds()
    valid = [role for role, kind in kinds.items() if kind != "reward"]
    for role, host in asked.items():
        key = f"roles.{role}.colocate"
        if host not in valid:
            what = f"`{key}` is '{host}', which is no role with devices"
            yield context.fault(key, what, hint(host, [r for r in valid if r != role]))
            continue
        seen = [role]
        while host in asked and host not in seen:
            seen.append(host)
            host = asked[host]
        if host == role:
            what = f"`{key}` goes round in a circle: {' -> '.join([*seen, role])}"
            yield context.fault(key, what, "leave one of them out")


def own_model_faults(context: Context) -> Iterator[Fault]:
    """A folder of its own that is no model, has another vocabulary, or cannot be cut so."""
    for role, section in context.models.items():
        path = getattr(section, "model", None)
        if path is None or role not in context.plan.layouts:
            continue
        key = f"roles.{role}.model"
        try:
            config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            what = f"{path} holds no readable config.json ({type(error).__name__})"
            yield context.fault(key, what, "name a folder in HuggingFace format")
            continue
        if not isinstance(config, dict) or missing_sizes(config) or not is_known(config):
            what = f"{path} is no model of a known architecture"
            yield context.fault(key, what, "choose another, or leave it out for model.path")
            continue
        main = context.hf_config
        if main is not None and config["vocab_size"] != main["vocab_size"]:
            what = f"{path} has {config['vocab_size']} token ids, model.path {main['vocab_size']}"
            yield context.fault(key, what, "choose a model with the actor's tokenizer")
        if context.recipe.roles.kinds()[role] == "value" and _scores(config) > 1:
            what = f"{path} ends in {_scores(config)} scores, and a value head in one"
            yield context.fault(key, what, "choose one with num_labels 1, or a base model")
        for problem in context.plan.layouts[role].problems(config):
            what, _, fix = problem.partition("; ")
            yield context.fault(f"roles.{role}.parallel", f"roles.{role}: {what}", fix)


def _scores(config: dict[str, Any]) -> int:
    """Scores per token of a model that ends in them, 0 of one that ends in a vocabulary."""
    from megatron_bridge.registry import has_value_head, labels

    return labels(config) if has_value_head(config) else 0


def vocabulary_faults(context: Context) -> Iterator[Fault]:
    """A model that ends in scores, for roles that end in the vocabulary."""
    from megatron_bridge.registry import has_value_head

    config, recipe = context.hf_config, context.recipe
    if config is None or not has_value_head(config):
        return
    kinds = recipe.roles.kinds()
    roles = [r for r in context.plan.layouts if kinds[r] == "model"]
    roles = [role for role in roles if recipe.model_path(role) == recipe.model.path]
    if roles:
        what = f"{recipe.model.path} ends in scores ({config['architectures'][0]}), but "
        what += f"{', '.join(roles)} give the probabilities of tokens"
        yield context.fault("model.path", what, "give the folder of a *ForCausalLM")


CHECKS = (
    Check(("model.path", "dataflow", "warm_start.dataflow", "roles.*"), vocabulary_faults),
    Check(("roles.critic", "roles.rollout.colocate"), host_faults),
    Check(("roles.critic", "roles.actor.parallel", "dataflow"), own_model_faults),
)
