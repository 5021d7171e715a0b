"""OLMo 2: norms after attention and MLP instead of before, q and k normed over all heads."""

from megatron_bridge.models import dense
from megatron_bridge.registry import Architecture, Row, kv_heads

_DEFAULTS = dense.DEFAULTS | {"rms_norm_eps": 1e-5}

ARCHITECTURES = (
    Architecture(
        name="Olmo2ForCausalLM",
        model_type="olmo2",
        rows=(
            dense.EMBEDDING,
            dense.QKV,
            Row(
                "decoder.layers.{layer}.self_attention.q_layernorm.weight",
                "head head_dim",
                (dense.weight("self_attn.q_norm", "head head_dim"),),
                cut="head",
            ),
            Row(
                "decoder.layers.{layer}.self_attention.k_layernorm.weight",
                "kv_head head_dim",
                (dense.weight("self_attn.k_norm", "kv_head head_dim"),),
                cut="kv_head",
            ),
            dense.ATTENTION_OUTPUT,
            dense.norm(
                "post_attention_layernorm", "self_attention.linear_proj.post_layernorm.weight"
            ),
            dense.GATED_FC1,
            dense.FC2,
            dense.norm("post_feedforward_layernorm", "mlp.linear_fc2.post_layernorm.weight"),
            *dense.OUTPUT,
        ),
        transformer=dense.transformer,
        required=dense.REQUIRED,
        defaults=_DEFAULTS,
        harmless=dense.HARMLESS,
        ignored=dense.IGNORED,
        # Unlike groups of queries and keys, a part of this norm cannot be held by several ranks.
        extra_sizes=lambda config: {"kv_head": kv_heads(config)},
        features=lambda config: {
            **dense.features(config),
            "input_norms": False,
            "post_norms": True,
            "wide_qk_norm": True,
        },
        refusals=dense.refusals(_DEFAULTS),
        models="OLMo 2 1B to 32B",
    ),
)
