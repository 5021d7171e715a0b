"""Every family's table: nothing of a model is lost, on either device, whatever cuts it."""

from itertools import product

import pytest
import torch

from hybridflow.weight_sync import ServerDigest, server_checksum
from hybridflow.weight_sync.checksum import parameters_checksum
from hybridflow.weight_sync.layout import FAMILIES, check, hf_shapes, server_parameters
from hybridflow.weight_sync.layout.build import build
from megatron_bridge.regions import slices
from megatron_bridge.reshard.targets import check as check_targets

_BASE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 72,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 8,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "n_shared_experts": 3,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_CHANGES: dict[str, dict] = {
    "DeepseekV2ForCausalLM": {**_LATENT, "q_lora_rank": None, "n_group": 1},
    "DeepseekV3ForCausalLM": {**_LATENT, "q_lora_rank": 28, "n_group": 2},
    "Gemma3ForCausalLM": {
        "head_dim": 20,
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "Glm4ForCausalLM": {"head_dim": 20, "attention_bias": True, "intermediate_size": 128},
    "LlamaForCausalLM": {"tie_word_embeddings": True},
    "MistralForCausalLM": {"head_dim": 20},
    "MixtralForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Olmo2ForCausalLM": {},
    "Phi3ForCausalLM": {"intermediate_size": 128},
    "Qwen2ForCausalLM": {},
    "Qwen2MoeForCausalLM": {
        **_EXPERTS,
        "num_experts": 8,
        "shared_expert_intermediate_size": 104,
    },
    "Qwen3ForCausalLM": {"head_dim": 20},
    "Qwen3MoeForCausalLM": {**_EXPERTS, "head_dim": 20, "num_experts": 8},
}
_TYPES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Gemma3ForCausalLM": "gemma3_text",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


def _config(family: str, **changes) -> dict:
    name = family.removesuffix("ForCausalLM").lower()
    made = {
        **_BASE,
        "architectures": [family],
        "model_type": _TYPES.get(family, name),
        **_CHANGES[family],
        **changes,
    }
    return {key: value for key, value in made.items() if value is not None or key == "q_lora_rank"}


def _weights(config: dict) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) for name, shape in hf_shapes(config).items()
    }


def _has_experts(config: dict) -> bool:
    return "num_experts_per_tok" in config


def _layouts(config: dict):
    for device, tp in product(("cpu", "cuda"), (1, 2, 4)):
        for ep in [ep for ep in (1, 2, 4) if tp % ep == 0 and (ep == 1 or _has_experts(config))]:
            yield {"tp": tp, "ep": ep, "device": device}


def test_every_family_is_tried():
    assert set(FAMILIES) == set(_CHANGES)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_can_be_put_together_again(family: str):
    config = _config(family)
    weights = _weights(config)
    for layout in _layouts(config):
        ranks = [server_parameters(config, rank=r, **layout) for r in range(layout["tp"])]
        check_targets(ranks, hf_shapes(config))
        found = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}
        for parameters in ranks:
            names = [parameter.name for parameter in parameters]
            assert len(set(names)) == len(names)
            for parameter in parameters:
                tensor = build(parameter, weights, torch.float32)
                assert tuple(tensor.shape) == parameter.shape
                for fill in parameter.fills:
                    place = found[fill.source][slices(fill.source_box)]
                    place.copy_(tensor[slices(fill.target_box)].view(place.shape))
        for name, tensor in weights.items():
            assert torch.equal(found[name], tensor), (layout, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_streamed_digest_is_of_the_built_parameters(family: str):
    config = _config(family)
    weights = _weights(config)
    ep = 2 if _has_experts(config) else 1
    ranks = [server_parameters(config, tp=4, ep=ep, rank=rank) for rank in range(4)]
    built = [{p.name: build(p, weights, torch.float32) for p in rank} for rank in ranks]
    want = parameters_checksum(built)
    assert server_checksum(weights, config, 4, ep) == want
    backwards = ServerDigest(config, 4, ep)
    for name in reversed(weights):
        backwards.add(name, weights[name])
    assert backwards.result() == want


def test_experts_of_four_ranks_by_hand():
    config = _config("Qwen3MoeForCausalLM")
    weights = _weights(config)
    module = "model.layers.1.mlp.experts."
    for rank in range(4):  # ranks 0 and 1 cut experts 0..3, ranks 2 and 3 experts 4..7
        parameters = {p.name: p for p in server_parameters(config, tp=4, ep=2, rank=rank)}
        w13 = build(parameters[f"{module}w13_weight"], weights, torch.float32)
        w2 = build(parameters[f"{module}w2_weight"], weights, torch.float32)
        # Each expert's 40 places are cut into two of 20; the padded 128 over two are 64.
        assert w13.shape == (4, 2 * 64, 48) and w2.shape == (4, 48, 64)
        half = slice(20 * (rank % 2), 20 * (rank % 2) + 20)
        for place, expert in enumerate(range(4 * (rank // 2), 4 * (rank // 2) + 4)):
            gate, up, down = (
                weights[f"{module}{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            assert torch.equal(w13[place, :20], gate[half])
            assert torch.equal(w13[place, 64:84], up[half])
            assert torch.equal(w2[place, :, :20], down[:, half])
            assert not w13[place, 20:64].any() and not w13[place, 84:].any()
            assert not w2[place, :, 20:].any()


def test_a_gpu_repeats_key_value_heads_and_pads_no_width():
    config = _config("Qwen3ForCausalLM", num_key_value_heads=2)
    weights = _weights(config)
    name = "model.layers.0.self_attn."
    for rank in range(4):
        parameters = {p.name: p for p in server_parameters(config, tp=4, rank=rank, device="cuda")}
        fused = build(parameters[f"{name}qkv_proj.weight"], weights, torch.float32)
        q, k, v = fused.split([40, 20, 20])
        assert torch.equal(q, weights[f"{name}q_proj.weight"][40 * rank : 40 * rank + 40])
        own = slice(20 * (rank // 2), 20 * (rank // 2) + 20)
        assert torch.equal(k, weights[f"{name}k_proj.weight"][own])
        assert torch.equal(v, weights[f"{name}v_proj.weight"][own])
        assert parameters["model.layers.0.mlp.down_proj.weight"].shape == (48, 18)
    with pytest.raises(ValueError, match="tp must divide the model's 2 KV heads"):
        check(config, tp=4)


def test_latent_attention_by_hand():
    config = _config("DeepseekV3ForCausalLM")
    weights = _weights(config)
    parameters = {p.name: p for p in server_parameters(config, tp=2, ep=2, rank=1)}
    attention = "model.layers.2.self_attn."
    fused = build(
        parameters[f"{attention}fused_qkv_a_proj_with_mqa.weight"], weights, torch.float32
    )
    down = [weights[f"{attention}{n}.weight"] for n in ("q_a_proj", "kv_a_proj_with_mqa")]
    assert torch.equal(fused, torch.cat(down))
    assert f"{attention}kv_a_proj_with_mqa.weight" not in parameters
    shared = parameters["model.layers.2.mlp.shared_experts.down_proj.weight"]
    assert shared.shape == (48, 3 * 64 // 2)  # three experts' widths, each padded from 40 to 64
    bias = parameters["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == "float32"
    assert build(bias, weights, torch.bfloat16).dtype == torch.float32


@pytest.mark.parametrize(
    ("family", "layout", "changes", "fault"),
    [
        ("Qwen3MoeForCausalLM", {"tp": 2, "ep": 4}, {}, "ep must divide tp"),
        ("Qwen3MoeForCausalLM", {"tp": 4, "ep": 4}, {"num_experts": 6}, "the model's 6 experts"),
        ("Qwen3ForCausalLM", {"tp": 2, "ep": 2}, {}, "ep must be 1 for a model without experts"),
        (
            "Qwen3MoeForCausalLM",
            {"tp": 4},
            {"moe_intermediate_size": 42},
            "tp / ep must divide an expert's width of 42",
        ),
        (
            "Phi3ForCausalLM",
            {"tp": 4},
            {"intermediate_size": 64},
            "must be a multiple of 32 tp = 128 on the CPU",
        ),
        ("Qwen3ForCausalLM", {"device": "gpu"}, {}, "device 'gpu' is none of a server's"),
        (
            "Qwen3MoeForCausalLM",
            {},
            {"mlp_only_layers": [1]},
            "no parameter for 3 of the model's tensors, among them model.layers.1.mlp.gate_proj",
        ),
    ],
)
def test_what_no_server_holds_is_named(family: str, layout: dict, changes: dict, fault: str):
    with pytest.raises(ValueError, match=fault):
        check(_config(family, **changes), **layout)
