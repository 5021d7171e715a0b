"""Experts and latent attention on gloo ranks: every layout computes what one rank computes."""

from typing import Any

import pytest
import torch

from megatron_bridge.layout import ParallelLayout
from tests.bridge.layers_moe import (
    KINDS,
    LAYERS,
    Results,
    chunks_of,
    compare,
    config_of,
    named,
    reference,
    train,
    whole,
)
from tests.ranks import run_ranks


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def one_rank(kind) -> Results:
    return run_ranks(reference, 1, kind, {})[0]


LAYOUTS: dict[str, tuple[ParallelLayout, dict[str, Any]]] = {
    "tp2": (ParallelLayout(tp=2), {}),
    "tp2-sequence-parallel": (ParallelLayout(tp=2), {"sequence_parallel": True}),
    "ep2": (ParallelLayout(dp=2, ep=2), {}),
    "tp2-ep2": (ParallelLayout(tp=2, dp=2, ep=2), {}),
    "tp2-ep2-etp1": (ParallelLayout(tp=2, ep=2, etp=1), {}),
    "pp2-vpp2": (ParallelLayout(pp=2, vpp=2), {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_one_rank(kind, layout, one_rank):
    shape, options = LAYOUTS[layout]
    results = run_ranks(compare, shape.world, kind, shape, options, one_rank)
    assert max(result["losses"] for result in results) < 1e-5
    assert max(result["gradients"] for result in results) < 1e-5, results


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        # Megatron's other way to move tokens: every rank sees all, so packs are filled up alike.
        (ParallelLayout(tp=2), {"moe_token_dispatcher_type": "allgather"}),
        (ParallelLayout(tp=2, ep=2, etp=1), {"moe_token_dispatcher_type": "allgather"}),
        (
            ParallelLayout(tp=2),
            {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        ),
        (
            ParallelLayout(tp=2, ep=2, etp=1),
            {"recompute_granularity": "full", "recompute_method": "uniform"}
            | {"recompute_num_layers": 1},
        ),
    ],
    ids=["allgather", "allgather-ep2", "recompute-experts", "recompute-all"],
)
def test_dispatchers_and_recompute_equal_one_rank(layout, options):
    wanted = run_ranks(reference, 1, "latent", {})[0]
    results = run_ranks(compare, layout.world, "latent", layout, options, wanted)
    assert max(result["losses"] for result in results) < 1e-5
    assert max(result["gradients"] for result in results) < 1e-5, results


def _checkpoint_keys(kind: str) -> tuple[set[str], set[str]]:
    """Keys of the distributed checkpoint, with and without layers that differ in kind."""
    from megatron.core import parallel_state

    layout = ParallelLayout()
    mixed = chunks_of(config_of(kind, layout), layout)[0]
    keys = {t.key for t in mixed.sharded_state_dict().values() if hasattr(t, "key")}  # type: ignore[operator]
    parallel_state.destroy_model_parallel()
    alike = chunks_of(config_of(kind, layout, moe_layer_freq=1), layout)[0]
    return keys, {t.key for t in alike.sharded_state_dict().values() if hasattr(t, "key")}  # type: ignore[operator]


_OUTSIDE = {
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
}
_ATTENTION = {
    "experts": {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
    },
    "latent": {
        "input_layernorm.weight",
        "self_attention.linear_q_down_proj.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.linear_q_up_proj.weight",
        "self_attention.linear_kv_down_proj.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "self_attention.linear_kv_up_proj.weight",
        "self_attention.linear_proj.weight",
    },
}
_DENSE = {
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
}
_SPARSE = {
    "pre_mlp_layernorm.weight",
    "mlp.router.weight",
    "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.experts.linear_fc2.weight",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc2.weight",
}
_OWN = {
    "experts": {"mlp.shared_experts.gate_weight"},
    "latent": {"mlp.router.expert_bias"},
}


@pytest.mark.parametrize("kind", _ATTENTION)
def test_checkpoint_keys_are_transformer_engines(kind):
    mixed, alike = run_ranks(_checkpoint_keys, 1, kind)[0]
    mlp = [_DENSE, _SPARSE | _OWN[kind], _SPARSE | _OWN[kind], _DENSE]
    layers = {f"{i}.{key}" for i in range(LAYERS) for key in _ATTENTION[kind] | mlp[i]}
    assert {key for key in mixed if "_extra_state" not in key} == _OUTSIDE | {
        f"decoder.layers.{key}" for key in layers
    }
    assert {key for key in alike if "_extra_state" not in key} == _OUTSIDE | {
        f"decoder.layers.{key}" for key in _ATTENTION[kind] | _SPARSE | _OWN[kind]
    }


def _cast_and_train() -> tuple[torch.dtype, bool, torch.dtype]:
    layout = ParallelLayout()
    chunks, _ = train("latent", layout, {})
    name, bias = next((n, b) for n, b in named(chunks) if n.endswith("expert_bias"))
    before = whole(name, bias)
    chunks[0].bfloat16()
    router = chunks[0].decoder.layers[1].mlp.router  # type: ignore[union-attr,index]
    return router.expert_bias.dtype, torch.equal(router.expert_bias, before), router.weight.dtype


def test_the_balancing_bias_stays_float32_and_still():
    assert run_ranks(_cast_and_train, 1) == [(torch.float32, True, torch.bfloat16)]


def test_groups_rank_by_their_best_experts():
    from megatron_bridge.runtime.moe import GroupLimit

    scores = torch.tensor([[0.9, 0.0, 0.5, 0.45, 0.3, 0.2]])
    default = lambda s, k: torch.topk(s, k)  # noqa: E731
    by_best = GroupLimit(1).get_replay_topk(scores, 2, 3, 2, default)[1]
    by_two = GroupLimit(2).get_replay_topk(scores, 2, 3, 1, default)[1]
    anywhere = GroupLimit(2).get_replay_topk(scores, 3, None, None, default)[1]
    assert by_best.tolist() == [[0, 2]]
    assert by_two.tolist() == [[2, 3]]
    assert anywhere.tolist() == [[0, 2, 3]]


def _replicated_start() -> list[torch.Tensor]:
    from megatron.core import parallel_state, tensor_parallel

    from megatron_bridge.runtime.specs import layer_spec

    layout = ParallelLayout(tp=2)
    config = config_of("latent", layout)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    from megatron.core.transformer.transformer_block import TransformerBlock

    block = TransformerBlock(config, layer_spec(config))
    return [
        parameter.detach().clone()
        for name, parameter in block.named_parameters()
        if "down_proj" in name or "router" in name
    ]


def test_replicated_weights_start_equal_on_every_rank():
    first, second = run_ranks(_replicated_start, 2)
    assert len(first) == 2 * LAYERS + 2
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert 0.5 < one.std().item() / 0.02 < 2
