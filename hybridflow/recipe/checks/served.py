"""Whether a rollout server runs the model, and can be cut as the recipe says."""

from collections.abc import Iterator
from typing import Any

from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.checks.model import is_known
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.served import LOCAL, NEVER_TIED, SERVED


def server_layout_faults(context: Context) -> Iterator[Fault]:
    """Tensor and expert parallelism of a server against the model's heads and experts."""
    rollout, config = context.recipe.roles.rollout, context.hf_config
    if rollout is None:
        return
    tp, ep = rollout.parallel.tp, rollout.parallel.ep
    if rollout.engine == "local" and tp > 1:
        what = f"the local engine runs on one device, not tp={tp}"
        fix = "set roles.rollout.parallel.tp to 1, or use engine: sglang"
        yield context.fault("roles.rollout.parallel.tp", what, fix)
        return
    if config is None:
        return
    heads = config["num_attention_heads"]
    sizes = [
        ("tp", tp, "num_attention_heads", heads),
        ("tp", tp, "num_key_value_heads", config.get("num_key_value_heads") or heads),
    ]
    if tp % ep == 0 and is_known(config):
        sizes += _expert_sizes(config, tp, ep)
    for field, parallel, name, size in sizes:
        if size % parallel:
            what = f"roles.rollout: {field}={parallel} does not divide {name}={size}"
            fix = f"choose {field} from {[n for n in range(1, size + 1) if size % n == 0]}"
            yield context.fault(f"roles.rollout.parallel.{field.split()[0]}", what, fix)


def _expert_sizes(config: dict[str, Any], tp: int, ep: int) -> list[tuple[str, int, str, int]]:
    """What a server cuts of experts: how many there are, and the width of each."""
    from megatron_bridge.registry import architecture
    from megatron_bridge.translation import resolve

    config = resolve(config)
    count = architecture(config).sizes(config).get("expert", 0)
    if not count:
        return [("ep", ep, "the number of experts", 1)] if ep > 1 else []
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    return [("ep", ep, "the number of experts", count), ("tp / ep", tp // ep, "their width", width)]


def served_faults(context: Context) -> Iterator[Fault]:
    """A model that can be trained, but not sampled from."""
    config = context.hf_config
    if config is None or not is_known(config) or "rollout" not in context.plan.roles:
        return
    engine = context.recipe.roles.servers.engine
    served, runs = (LOCAL, "the local engine") if engine == "local" else (SERVED, "SGLang")
    name = (config.get("architectures") or ["none"])[0]
    if name not in served:
        what = f"{runs} does not serve {name} here: its weights there could not be proven"
        fix = f"sample from one of {', '.join(served)}, or leave out the nodes of the rollout"
        yield context.fault("model.path", what, fix)
    elif engine == "sglang" and name in NEVER_TIED and config.get("tie_word_embeddings"):
        what = (
            f"SGLang never ties {name}'s output layer to its embedding, as tie_word_embeddings of "
            "the model's config.json says; the server's would hold nothing"
        )
        fix = "sample with the local engine, or from a checkpoint that holds lm_head.weight"
        yield context.fault("model.path", what, fix)
    elif _experts_are_left_out(config):
        what = (
            f"SGLang gives every layer of {name} experts, and mlp_only_layers or "
            "decoder_sparse_step leave some without"
        )
        fix = "sample from a model with experts in every layer, or leave out the rollout's nodes"
        yield context.fault("model.path", what, fix)


def _experts_are_left_out(config: dict[str, Any]) -> bool:
    """Whether a layer has none in a family whose servers give experts to all."""
    from megatron_bridge.registry import architecture
    from megatron_bridge.translation import resolve

    config = resolve(config)
    if "decoder_sparse_step" not in config:
        return False
    is_moe = architecture(config).is_moe
    return not all(is_moe(config, layer) for layer in range(config["num_hidden_layers"]))


CHECKS = (
    Check(("model.path", "roles.rollout.parallel", "roles.rollout.engine"), server_layout_faults),
    Check(("model.path", "dataflow", "warm_start.dataflow", "roles.rollout.engine"), served_faults),
)
