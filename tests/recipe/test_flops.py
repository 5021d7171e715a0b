"""Counted operations: a small model by hand, and a published size."""

import pytest

from hybridflow.recipe.flops import ModelFlops, Work, peak_flops

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 28,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


def test_what_a_pass_goes_over() -> None:
    """A prompt counts once for all its responses; nothing follows a response's last token."""
    work = Work.of([3, 2], [1, 2, 3, 0])
    assert (work.tokens, work.labels) == (5 + 0 + 1 + 2 + 0, 6)
    # prompts 1+2+3 and 1+2; the second response's first token sees 4, the third's two 3 and 4
    assert work.pairs == 6 + 3 + 4 + 3 + 4


def test_a_published_size() -> None:
    """Qwen3-0.6B has 0.44 billion weights beside its embedding."""
    flops = ModelFlops(CONFIG)
    per_token = flops.forward(Work(1, 0, 0)) / 2
    assert per_token == 440_401_920
    head = flops.forward(Work(0, 0, 1)) / 2
    assert head == 151936 * 1024
    assert flops.forward(Work(0, 1, 0)) == 4 * 28 * 16 * 128  # QK and AV, two operations each
    work = Work.of([100], [50])
    assert flops.training(work) == 3 * flops.forward(work)


def test_of_experts_those_that_are_used_count() -> None:
    config = {
        **CONFIG,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    two, three = (
        ModelFlops({**config, "num_experts_per_tok": used}).forward(Work(1, 0, 0))
        for used in (2, 3)
    )
    assert three - two == pytest.approx(2 * 28 * 3 * 1024 * 768)


@pytest.mark.parametrize(
    ("device", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA A10", "float32", 31.2),
        ("NVIDIA H200", "float32", 66.9),
        ("cpu", "float32", None),
    ],
)
def test_peaks(device: str, dtype: str, tflops: float | None) -> None:
    peak = peak_flops(device, dtype)
    assert peak == (None if tflops is None else pytest.approx(tflops * 1e12))
