"""The symbolic proof holds for every table at every layout; its report."""

import json
import subprocess
import sys
from typing import Any

import pytest

from megatron_bridge import mappings, registry, translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.proof import prove
from tests.bridge.brute_force import tiny_config

LAYOUTS = [
    "tp=1",
    "dp=3",
    "tp=2",
    "tp=4",
    "tp=2,pp=2,dp=2",
    "pp=4",
    "pp=2,vpp=2",
    "tp=2,pp=3,first_stage_layers=1,last_stage_layers=1",
    "pp=2,first_stage_layers=1",
    "tp=2,pp=2,dp=2,ep=2,etp=1",
    "tp=2,dp=2,ep=2",
    "tp=1,dp=4,ep=2,etp=2",
    "tp=4,pp=2,dp=2,ep=4,etp=1,vpp=2",
]
MOE = "tp=2,pp=2,dp=2,ep=2,etp=1"
QWEN, QWEN_MOE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"


def _config(name: str, **fields: Any) -> dict[str, Any]:
    return tiny_config(registry.architecture({"architectures": [name]}), **fields)


def _possible(config: dict[str, Any]) -> list[ParallelLayout]:
    found = [ParallelLayout.parse(text) for text in LAYOUTS]
    return [layout for layout in found if not layout.problems(config)]


@pytest.mark.parametrize("name", registry.supported())
@pytest.mark.parametrize("tied", [False, True])
def test_every_table_is_proven_at_every_layout(name, tied):
    config = _config(name, tie_word_embeddings=tied)
    layouts = _possible(config)
    assert len(layouts) >= 6
    for layout in layouts:
        report = prove(config, layout, dtype="float32")
        assert report.ok, report.table()
        assert report.ranks == layout.world
        assert report.bytes == 4 * report.elements
        shapes = mappings.huggingface_shapes(translation.resolve(config))
        assert report.tensors == len(shapes)


def test_the_bytes_are_those_of_the_parameters():
    """Without tensor parallelism stages hold the model once, a tied embedding twice."""
    config = _config(QWEN, tie_word_embeddings=True)
    one = prove(config, ParallelLayout())
    two = prove(config, ParallelLayout(pp=2))
    embedding = config["vocab_size"] * config["hidden_size"] * 2
    assert one.rank_bytes == (one.bytes,)
    assert sum(two.rank_bytes) == one.bytes + embedding
    # The vocabulary of 13 is padded to 14 for two ranks; norms are on both.
    cut = prove({**config, "tie_word_embeddings": False}, ParallelLayout(tp=2))
    norms = 2 * (4 * (2 * config["hidden_size"] + 2 * config["head_dim"]) + config["hidden_size"])
    padding = 2 * config["hidden_size"] * 2
    assert sum(cut.rank_bytes) == cut.bytes + norms + padding


def test_buffers_in_float32_count_as_such():
    config = _config("DeepseekV3ForCausalLM")
    bias = 3 * config["n_routed_experts"]  # one per layer with experts
    report = prove(config, ParallelLayout())
    assert report.bytes == 2 * report.elements + 2 * bias
    assert report.rank_bytes == (report.bytes,)


def test_the_report_is_json_and_text():
    config = _config(QWEN_MOE)
    report = prove(config, ParallelLayout.parse(MOE))
    content = json.loads(json.dumps(report.to_json()))
    assert content["ok"] and content["problems"] == [] and len(content["rank_bytes"]) == 8
    assert content["least"] <= content["mean"] <= content["most"]
    assert [stage["layers"] for stage in content["stages"]] == [2, 2]
    assert "proven" in report.table() and QWEN_MOE in report.table()


def test_what_cannot_be_proven_is_refused():
    with pytest.raises(ValueError, match="cannot be cut"):
        prove(_config(QWEN), ParallelLayout(tp=3))
    with pytest.raises(ValueError, match="choose from float64"):
        prove(_config(QWEN), ParallelLayout(), dtype="int8")
    with pytest.raises(ValueError, match="not supported"):
        prove({**_config(QWEN), "attention_bias": True, "hidden_act": "relu"}, ParallelLayout())


def test_proving_imports_no_torch():
    code = "import sys, megatron_bridge.proof; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}


def test_deepseek_v3_in_small():
    """Its published widths, three dense layers and two with 16 experts, on 256 ranks."""
    config = {**DEEPSEEK_V3, "num_hidden_layers": 5, "n_routed_experts": 16}
    layout = ParallelLayout.parse("tp=8,pp=2,ep=8,etp=2,dp=16,first_stage_layers=3")
    report = prove(config, layout)
    assert report.ok, report.table()
    assert [stage.layers for stage in report.stages] == [3, 2]


@pytest.mark.slow
def test_deepseek_v3_on_2048_ranks():
    layout = "tp=8,pp=16,ep=64,etp=1,dp=16,first_stage_layers=3,last_stage_layers=2"
    report = prove(DEEPSEEK_V3, ParallelLayout.parse(layout))
    assert report.ok, report.table()
    assert report.ranks == 2048
    assert report.elements == 671_026_419_200
    assert report.bytes == 2 * report.elements + 2 * 58 * 256  # the routers' biases
