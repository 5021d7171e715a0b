"""The tables against HuggingFace's own models, and what they refuse."""

import itertools
import subprocess
import sys
from dataclasses import fields

import pytest

from megatron_bridge import mappings, registry, translation
from megatron_bridge.layout import ParallelLayout
from tests.bridge import tiny


def _config(kind: str = "qwen3", **fields) -> dict:
    config = tiny.config(kind).to_dict()
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    return {**config, "architectures": [f"{name}ForCausalLM"], **fields}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_a_table_lists_exactly_huggingfaces_tensors(kind, tied):
    model = tiny.model(kind, tied=tied)
    config = translation.resolve(model.config.to_dict())
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert mappings.huggingface_shapes(config) == theirs


def test_imports_no_torch():
    code = (
        "import sys, megatron_bridge.registry as r, megatron_bridge.translation, "
        "megatron_bridge.layout; r.supported(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_names_with_and_without_transformer_engine():
    config = translation.resolve(_config())
    named = {name: w for w in mappings.weights(config) for name in w.live_names(None)}
    for name in ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"):
        weight = named[f"decoder.layers.3.{name}"]
        assert [part.name for part in weight.parts] == ["model.layers.3.input_layernorm.weight"]


def test_an_unknown_architecture_names_the_known_ones():
    with pytest.raises(ValueError, match=r"no table for GemmaForCausalLM.*Qwen3ForCausalLM.*add"):
        registry.architecture({"architectures": ["GemmaForCausalLM"]})


def test_an_unknown_name_says_what_to_register():
    config = _config()
    table = registry.architecture(config)
    known = table.patterns(config)
    text = registry.uncovered("tensor", "model.layers.0.mlp.up_prj.weight", known, table)
    assert "register a Row for 'model.layers.{layer}.mlp.up_prj.weight'" in text
    assert "nearest known: 'model.layers.{layer}.mlp.up_proj.weight'" in text
    assert "megatron_bridge/models/qwen3.py" in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported.*'silu'"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"logit_softcapping": 30.0}, "logit_softcapping=30.0, which the bridge does not know"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types.*sliding_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic' is not"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fas": 3}},
            "beta_fas=3, which the bridge does not know.*'beta_fast'",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}},
            "'llama3' needs high_freq_factor",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method=.awq. are not read"),
    ],
)
def test_what_would_change_the_computation_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        translation.resolve(_config(**fields))


def test_every_fault_is_told_at_once():
    faults = translation.problems(_config(hidden_act="gelu", odd=1, rope_parameters={"type": "x"}))
    assert len(faults) == 3


def test_private_empty_and_harmless_fields_pass():
    translation.resolve(_config(_attn_implementation="sdpa", odd=None, other=False, use_cache=True))


def test_rotary_base_from_either_form_of_config():
    new = _config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    old = {key: value for key, value in _config().items() if key != "rope_parameters"}
    old |= {"rope_theta": 5e5, "rope_scaling": None}
    for config in (new, old):
        found = translation.features(translation.resolve(config))
        assert found["rotary"]["rope_theta"] == 5e5


def test_absent_head_dim_is_the_architectures_own():
    config = _config("qwen3")
    del config["head_dim"]
    assert registry.head_dim(translation.resolve(config)) == 128
    config = _config("llama", head_dim=None)
    assert registry.head_dim(translation.resolve(config)) == 12


def test_layouts_that_cut_heads_or_layers_are_refused():
    fields = ["num_hidden_layers=4", "num_attention_heads=4", "num_key_value_heads=2"]
    fields.append("intermediate_size=80")
    found = ParallelLayout(tp=3, pp=3).problems(_config())
    assert [next(f for f in fields if f in one) for one in found] == fields
    assert all("choose tp from [1, 2, 4]" in one for one in found[1:])
    assert ParallelLayout(tp=2, pp=4, dp=3).problems(_config()) == []


def test_ranks_are_placed_in_megatrons_order():
    layout = ParallelLayout(tp=2, pp=2, dp=3)
    places = [layout.coordinates(rank) for rank in range(layout.world)]
    assert layout.world == 12
    assert places[0] == (0, 0, 0) and places[1] == (1, 0, 0)
    assert places[2] == (0, 1, 0) and places[6] == (0, 0, 1)
    assert len(set(places)) == 12


@pytest.mark.parametrize("size", [0, -1, "2", 2.0, True])
@pytest.mark.parametrize("name", [field.name for field in fields(ParallelLayout)])
def test_a_parallel_size_is_a_positive_whole_number(name, size):
    with pytest.raises(ValueError, match=f"at least 1, {name}={size!r} is none"):
        ParallelLayout(**{name: size})


@pytest.mark.parametrize("name", ["tp", "pp", "dp", "ep", "vpp"])
def test_a_parallel_size_is_not_null(name):
    with pytest.raises(ValueError, match=f"{name}=None"):
        ParallelLayout(**{name: None})  # type: ignore[arg-type]


def test_every_layout_that_is_not_refused_gives_each_layer_one_place():
    config = _config()
    sizes = (None, 1, 2, 3, 4, 5)
    accepted = 0
    for pp, vpp, first, last in itertools.product((1, 2, 3, 4, 5), (1, 2, 4), sizes, sizes):
        layout = ParallelLayout(pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last)
        if layout.problems(config):
            continue
        accepted += 1
        places = {
            layer: (stage, chunk)
            for stage in range(pp)
            for chunk in range(vpp)
            for layer in layout.stage_layers(4, stage, chunk)
        }
        assert sorted(places) == [0, 1, 2, 3]
        assert {stage for stage, _ in places.values()} == set(range(pp))
        assert all(layout.stage_of(4, layer) == place for layer, place in places.items())
    assert accepted > 10
