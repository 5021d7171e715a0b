"""Dense families and GPT-OSS: a parallel Megatron model computes what transformers' class does."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_bridge import live, translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.registry import architecture
from tests.bridge import families_dense, parity, published_dense, tiny
from tests.ranks import run_ranks

LAYOUTS = {
    "tp1": ParallelLayout(),
    "tp2": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "tp2pp2": ParallelLayout(tp=2, pp=2),
    "shared_heads": ParallelLayout(tp=4),
}
EXPERTS = {
    "ep2": ParallelLayout(dp=2, ep=2),
    "etp2": ParallelLayout(tp=2, etp=2),
    "ep2tp2": ParallelLayout(tp=2, dp=2, ep=2),
    "ep2-within-tp2": ParallelLayout(tp=2, ep=2, etp=1),
    "pp2vpp2": ParallelLayout(pp=2, vpp=2),
}
QUICK = ("tp1", "tp2pp2", "ep2tp2")


def _cases() -> list[Any]:
    cases = []
    for kind in families_dense.CONFIGS:
        for layout in LAYOUTS | (EXPERTS if kind == "gpt_oss" else {}):
            if (kind, layout) == ("olmo2", "shared_heads"):
                continue  # refused: see below
            marks = () if layout in QUICK else (pytest.mark.slow,)
            cases.append(pytest.param(kind, layout, marks=marks))
    return cases


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[[str], tuple[Path, parity.Wanted]]:
    known: dict[str, tuple[Path, parity.Wanted]] = {}

    def make(kind: str) -> tuple[Path, parity.Wanted]:
        if kind not in known:
            model = families_dense.model(kind)
            wanted = parity.wanted(model)
            known[kind] = tiny.save(model, tmp_path_factory.mktemp("hf")), wanted
        return known[kind]

    return make


@pytest.mark.parametrize(("kind", "layout"), _cases())
def test_logits_gradients_and_export_equal_huggingface(made, kind, layout):
    folder, wanted = made(kind)
    shape = (LAYOUTS | EXPERTS)[layout]
    parity.check(run_ranks(parity.compare, shape.world, folder, shape, wanted))


@pytest.mark.parametrize("kind", ["gemma3", "olmo2"])
def test_sequences_cut_over_ranks_change_nothing(made, kind):
    folder, wanted = made(kind)
    shape = ParallelLayout(tp=2)
    results = run_ranks(parity.compare, 2, folder, shape, wanted, sequence_parallel=True)
    parity.check(results)


def test_a_norm_over_all_key_heads_is_not_cut_finer_than_heads():
    config = families_dense.CONFIGS["olmo2"][0](**tiny.SIZES).to_dict()
    (problem,) = ParallelLayout(tp=4).problems(config | {"architectures": ["Olmo2ForCausalLM"]})
    assert "kv_head=2" in problem


def _checkpoint_keys(folder: Path) -> set[str]:
    """Of the tensors that this rank would write to Megatron's distributed checkpoint."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    (model,) = parity.build(folder, ParallelLayout(tp=2))
    found: set[str] = set()
    for one in nested_values(model.sharded_state_dict()):
        parts = nested_values(one.build()) if isinstance(one, ShardedTensorFactory) else [one]
        found |= {part.key for part in parts if isinstance(part, ShardedTensor)}
    return found


@pytest.mark.parametrize("kind", ["gemma3", "olmo2", "gpt_oss"])
def test_megatrons_checkpoint_has_the_keys_of_the_table(made, kind):
    folder, _ = made(kind)
    config = translation.resolve(live.load_hf_config(folder))
    rows = architecture(config).rows_of(config)
    keys = {row.checkpoint_key.replace("layers.{layer}.", "layers.") for row in rows}
    for found in run_ranks(_checkpoint_keys, 2, folder):
        assert found == keys


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        packs = parity.packs(model.config.vocab_size)
        return torch.cat([model(ids[None, :-1]).logits[0] for pack in packs for ids in pack])


def _without(part: str, value: Any = None) -> Callable[[Any], None]:
    """Replaces modules of this name by nothing, or fills tensors of it with ``value``."""

    def change(model: Any) -> None:
        if value is None:
            for module in model.modules():
                if part in module._modules:
                    setattr(module, part, torch.nn.Identity())
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if part in name and value is not None:
                torch.nn.init.constant_(tensor, value)

    return change


def _without_expert(expert: int) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                with torch.no_grad():
                    parameter[expert] = 0

    return change


_PLAIN = {"rope_type": "default", "rope_theta": 5000.0}
_LONGROPE = families_dense.CONFIGS["phi3"][1]["rope_parameters"]
_GEMMA = families_dense.CONFIGS["gemma3"][1]["rope_parameters"]
OFF: list[tuple[str, dict[str, Any] | Callable[[Any], None]]] = [
    ("llama", {"rope_parameters": _PLAIN}),
    ("llama", {"rope_parameters": families_dense.LLAMA3 | {"low_freq_factor": 1.0}}),
    ("llama", {"rope_parameters": families_dense.LLAMA3 | {"high_freq_factor": 4.0}}),
    ("llama_linear", {"rope_parameters": _PLAIN}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": families_dense.WINDOW + 1}),
    ("qwen2", {"use_sliding_window": False}),
    ("qwen2", {"max_window_layers": 3}),
    ("qwen2", {"rope_parameters": _PLAIN}),
    ("qwen3", {"rope_parameters": families_dense.YARN | {"attention_factor": 1.0}}),
    ("gemma3", {"sliding_window": 64}),
    ("gemma3", {"query_pre_attn_scalar": 16}),
    ("gemma3", {"rope_parameters": _GEMMA | {"full_attention": _PLAIN}}),
    ("gemma3", {"rope_parameters": _GEMMA | {"sliding_attention": families_dense.LINEAR}}),
    ("gemma3", {"hidden_activation": "silu"}),
    ("gemma3", _without("post_attention_layernorm")),
    ("gemma3", _without("post_feedforward_layernorm")),
    ("gemma3", _without("embed_scale", 1.0)),
    ("phi3", {"sliding_window": None}),
    ("phi3", {"rope_parameters": _LONGROPE | {"long_factor": _LONGROPE["short_factor"]}}),
    ("phi3", {"rope_parameters": _LONGROPE | {"short_factor": _LONGROPE["long_factor"]}}),
    ("phi3", {"rope_parameters": _LONGROPE | {"attention_factor": 1.0}}),
    ("olmo2", _without("post_attention_layernorm")),
    ("olmo2", _without("post_feedforward_layernorm")),
    ("olmo2", _without("q_norm")),
    ("olmo2", _without("k_norm")),
    ("glm4", {"partial_rotary_factor": 1.0}),
    ("glm4", _without("post_self_attn_layernorm")),
    ("glm4", _without("post_mlp_layernorm")),
    ("gpt_oss", {"sliding_window": 64}),
    ("gpt_oss", {"swiglu_limit": 1e9}),
    ("gpt_oss", {"rope_parameters": _PLAIN}),
    ("gpt_oss", _without("sinks", -1e9)),
    ("gpt_oss", _without("router.bias", 0.0)),
    ("gpt_oss", _without("gate_up_proj_bias", 0.0)),
    ("gpt_oss", _without("down_proj_bias", 0.0)),
    ("gpt_oss", _without("o_proj.bias", 0.0)),
    *(("gpt_oss", _without_expert(expert)) for expert in range(6)),
]


@pytest.mark.parametrize(("kind", "off"), OFF)
def test_without_it_the_logits_differ(kind, off):
    """So a model that lacks it does not pass the tests above."""
    model = families_dense.model(kind)
    fields = off if isinstance(off, dict) else {}
    other = families_dense.model(kind, **fields)
    if callable(off):
        off(other)
    difference = (_logits(model) - _logits(other)).abs().max().item()
    assert difference > 1e-2


@pytest.mark.parametrize("name", published_dense.PUBLISHED)
def test_published_configs_are_translated(name, tmp_path):
    """Their rotary embeddings equal those of transformers' own class."""
    from megatron_bridge.runtime.rotary_embedding import frequencies

    published = published_dense.PUBLISHED[name]
    config = translation.resolve(published)
    features = translation.features(config)
    theirs = transformers.AutoConfig.for_model(**deepcopy(published))
    mine = {"full_attention": features["rotary"], "sliding_attention": features.get("local_rotary")}
    for kind, parameters in mine.items():
        if parameters is not None:
            made = frequencies(parameters, translation.transformer_arguments(config)["kv_channels"])
            inverse, factor = _rotary(theirs, kind)
            torch.testing.assert_close(made.inverse, inverse, rtol=1e-6, atol=0)
            assert made.factor == pytest.approx(factor, rel=1e-9)


def _rotary(config: Any, kind: str) -> tuple[torch.Tensor, float]:
    """Inverse frequencies and factor of transformers' own rotary embedding."""
    made = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    module = __import__(made.__module__, fromlist=["_"])
    name = next(n for n in vars(module) if n.endswith("RotaryEmbedding"))
    rotary = getattr(module, name)(config)
    if hasattr(rotary, f"{kind}_inv_freq"):
        return getattr(rotary, f"{kind}_inv_freq"), getattr(rotary, f"{kind}_attention_scaling")
    return rotary.inv_freq, rotary.attention_scaling


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "it has full_attention"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 4}, "'chunked_attention'"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "1 entries for 4 layers"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "gives no sliding_window"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1 is not supported"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not"),
        ("llama", {"partial_rotary_factor": 0.5}, "rotates whole heads"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 is not supported"),
        ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit=null, which must be a number above 0"),
        ("gpt_oss", {"experts_per_token": 2, "num_experts_per_tok": 3}, "differ"),
    ],
)
def test_what_would_change_the_computation_is_refused(kind, fields, message):
    config = {
        "model_type": kind,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 131,
    }
    assert architecture(config).model_type == kind
    with pytest.raises(ValueError, match=message):
        translation.resolve(config | fields)
