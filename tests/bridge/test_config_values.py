"""config.json files that were written by hand, cut short or broken: refused, or read as meant."""

import json
from typing import Any

import pytest
import torch
import transformers

from megatron_bridge import live, registry, translation
from megatron_bridge.layout import ParallelLayout
from tests.bridge import families_dense, families_moe, parity, tiny
from tests.ranks import run_ranks

TABLES = {table.name: table for table in registry.tables()}
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
}


def _config(name: str, **fields: Any) -> dict[str, Any]:
    """Little more than the sizes, so that what is absent has its default."""
    table = TABLES[name]
    if "kv_lora_rank" in table.defaults:
        fields = {"num_key_value_heads": 4, "num_experts_per_tok": 3} | fields
    else:
        fields = {"head_dim": 16} | fields
    return {"architectures": [name], "model_type": table.model_type, **SIZES, **fields}


_BAD: dict[str, list[Any]] = {
    **dict.fromkeys(SIZES, ["48", 48.5, -4, 0, True, [4], {}]),
    "num_key_value_heads": ["2", -2, 0, True],
    "rms_norm_eps": ["1e-6", -1.0, 0, None],
    "max_position_embeddings": ["256", 0, None],
    "rope_theta": ["10000", -1.0, 0],
    "rope_scaling": ["linear", [1], {"type": 3}, {"rope_type": "linear", "factor": "2"}],
    "rope_parameters": ["default", {"rope_type": "linear", "factor": 0}],
    "tie_word_embeddings": [None, "false", 1],
    "layer_types": ["full_attention", [3], [], ["full_attention"]],
    "quantization_config": ["fp8", 3],
    "architectures": ["LlamaForCausalLM", [3]],
    "head_dim": ["16", 0, -16, 15],
    "sliding_window": ["7"],
    "initializer_range": ["0.02"],
}
_BAD_OF_EXPERTS: dict[str, list[Any]] = {
    "num_experts_per_tok": ["3", None, 0, 999],
    "n_routed_experts": ["6", 0, -1],
    "num_experts": ["6", 0, -1],
    "num_local_experts": ["6", 0, -1],
    "moe_intermediate_size": ["28", 0, None],
    "shared_expert_intermediate_size": [0, None],
    "n_shared_experts": [0, "2", None],
    "norm_topk_prob": ["false", None],
    "decoder_sparse_step": [0, None, "1"],
    "mlp_only_layers": ["2", 2, ["2"]],
    "first_k_dense_replace": [-1, None, "1"],
    "n_group": [0, "3"],
    "topk_group": [0, -1, "2"],
    "q_lora_rank": [0, "22"],
    "kv_lora_rank": [0, -4, None],
    "qk_rope_head_dim": [7, 0, None],
    "v_head_dim": [0, None],
    "routed_scaling_factor": [0, None, "2"],
    "rope_interleave": [None],
    "swiglu_limit": [0, "7", None],
}


def _bad(name: str) -> list[tuple[str, Any]]:
    table = TABLES[name]
    read = {*SIZES, *table.required, *table.defaults}
    read |= {"architectures", "quantization_config", "layer_types", "initializer_range"}
    fields = _BAD | {f: v for f, v in _BAD_OF_EXPERTS.items() if f in read}
    cases = [(field, value) for field in fields if field in read for value in fields[field]]
    good = []
    if "kv_lora_rank" in read:  # such heads have other sizes, the field is not read
        good.append(("head_dim", 15))
    if table.required.get("norm_topk_prob") == (False,):
        good.append(("norm_topk_prob", None))
    return [case for case in cases if case not in good]


@pytest.mark.parametrize("name", TABLES)
def test_no_table_reads_what_a_field_cannot_be(name):
    good = _config(name)
    translation.resolve(good)
    passed = []
    for field, value in _bad(name):
        try:
            translation.resolve({**good, field: value})
        except ValueError as error:
            assert field in str(error) or "components" in str(error), (field, value, str(error))
        else:
            passed.append((field, value))
    assert not passed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 8}, "num_key_value_heads=8 does not divide num_attention_heads=4"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        ({"head_dim": None, "hidden_size": 50}, "does not divide hidden_size=50; set head_dim"),
        (
            {"architectures": ["LlamaForSequenceClassification", "LlamaForCausalLM"]},
            "asks for a vocabulary and for scores",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8}},
            "'longrope' needs long_factor",
        ),
        ({"hidden_size": "48", "rope_theta": 0}, "hidden_size='48'.*\n.*rope_theta=0"),
    ],
)
def test_fields_that_do_not_go_together_are_told(fields, message):
    with pytest.raises(ValueError, match=message):
        translation.resolve(_config("LlamaForCausalLM", **fields))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("MistralForCausalLM", {"layer_types": ["full_attention"] * 4}, "layers of two kinds"),
        ("MixtralForCausalLM", {"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        (
            "Qwen3MoeForCausalLM",
            {"sliding_window": -1, "use_sliding_window": True},
            "sliding_window=-1 must be at least 1",
        ),
        (
            "Gemma3ForCausalLM",
            {"rope_scaling": {"type": "linear", "factor": 8.0}},
            "say rope_type",
        ),
        ("Gemma3ForCausalLM", {"partial_rotary_factor": 0.5}, "rotates whole heads"),
        ("DeepseekV3ForCausalLM", {"topk_group": 9}, "topk_group=9 is more than n_group=8"),
        ("DeepseekV3ForCausalLM", {"norm_topk_prob": None}, "norm_topk_prob=null"),
        (
            "Phi3ForCausalLM",
            {
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0] * 7,
                    "long_factor": [2.0] * 8,
                }
            },
            "short_factor has 7 entries for the 8 pairs",
        ),
        ("Gemma3ForCausalLM", {"logit_scale": 2.0}, "models/gemma3.py"),
    ],
)
def test_what_transformers_computes_otherwise_is_refused(name, fields, message):
    with pytest.raises(ValueError, match=message):
        translation.resolve(_config(name, **fields))


# No weights are made of these; every table's own number of key-value heads divides 32.
_LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "vocab_size": 131,
}


def _meaning(config: dict[str, Any]) -> dict[str, Any]:
    made = translation.resolve(config)
    return {
        "sizes": registry.architecture(made).sizes(made),
        "rows": [row.megatron for row in registry.architecture(made).rows_of(made)],
        **translation.transformer_arguments(made),
        **translation.gpt_arguments(made),
        **translation.features(made),
    }


@pytest.mark.parametrize("name", TABLES)
def test_an_absent_field_has_transformers_default(name):
    table = TABLES[name]
    kept: dict[str, Any] = _LARGE | {"model_type": table.model_type, "architectures": [name]}
    if "kv_lora_rank" in table.defaults:  # transformers' defaults of these fit no other sizes
        kept |= {"num_key_value_heads": 32, "num_experts_per_tok": 3, "head_dim": 64}
    theirs = transformers.AutoConfig.for_model(**kept).to_dict()
    assert _meaning({**theirs, "architectures": [name]}) == _meaning(kept)


@pytest.mark.parametrize("name", TABLES)
def test_absent_rotary_embeddings_are_transformers_own(name):
    theirs = transformers.AutoConfig.for_model(TABLES[name].model_type).rope_parameters
    config = translation.resolve(_config(name))
    features = translation.features(config)
    if features.get("rotary") is None:
        assert translation.transformer_arguments(config)["rotary_base"] == theirs["rope_theta"]
        return
    kinds = theirs if "full_attention" in theirs else {"full_attention": theirs}
    mine = {"full_attention": features["rotary"], "sliding_attention": features.get("local_rotary")}
    for kind, parameters in kinds.items():
        assert {k: mine[kind][k] for k in parameters} == parameters


def _minimal(folder: Any, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    (model,) = parity.build(folder, ParallelLayout())
    return [out[0] for out in parity.run([model], [sequences], train=False)]


@pytest.mark.parametrize("kind", ["mistral", "qwen3", "gemma3", "glm4", "qwen3_moe"])
def test_a_config_without_fields_that_have_defaults_loads_alike(kind, tmp_path):
    """As a file written by hand: transformers and the bridge fill in the same."""
    module = families_moe if kind in families_moe.CONFIGS else families_dense
    source = module.model(kind).config.to_dict()
    experts = ("num_experts", "num_local_experts", "num_experts_per_tok", "pad_token_id")
    kept = {f: source[f] for f in (*SIZES, "model_type", *experts) if f in source}
    kept |= {"hidden_size": 48, "num_key_value_heads": 2, "pad_token_id": None}
    made = transformers.AutoConfig.for_model(**kept)
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    tiny.save(model, tmp_path)
    names = {"architectures": [type(model).__name__]}
    text = json.dumps({f: v for f, v in kept.items() if v is not None} | names)
    (tmp_path / "config.json").write_text(text)
    assert live.load_hf_config(tmp_path).keys() <= {*kept, "architectures"}
    pack = parity.packs(SIZES["vocab_size"])[0]
    with torch.no_grad():
        wanted = torch.cat([model(ids[None, :-1]).logits[0] for ids in pack])
    ((found,),) = run_ranks(_minimal, 1, tmp_path, pack)
    torch.testing.assert_close(found[:, : wanted.shape[1]], wanted, rtol=0, atol=1e-4)


def _old_form(new: dict[str, Any]) -> dict[str, Any]:
    """A config.json as transformers 4 wrote it: rotary embeddings in fields of their own."""
    old = {field: value for field, value in new.items() if field != "rope_parameters"}
    given = dict(new["rope_parameters"])
    if "full_attention" in given:
        old["rope_local_base_freq"] = given["sliding_attention"]["rope_theta"]
        given = dict(given["full_attention"])
    old["rope_theta"] = given.pop("rope_theta")
    if "partial_rotary_factor" in given:
        old["partial_rotary_factor"] = given.pop("partial_rotary_factor")
    old["rope_scaling"] = None if given["rope_type"] == "default" else given
    return old


@pytest.mark.parametrize("kind", families_dense.CONFIGS)
def test_old_and_new_configs_say_the_same(kind):
    new = families_dense.model(kind).config.to_dict()
    new["architectures"] = [registry.architecture(new).name]
    assert new["rope_parameters"] and _meaning(_old_form(new)) == _meaning(new)
