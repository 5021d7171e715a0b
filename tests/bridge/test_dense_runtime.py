"""Parts of layers that not every model has, against plain formulas and transformers' own."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_bridge.layout import ParallelLayout
from megatron_bridge.runtime import attention, device, parallel
from megatron_bridge.runtime.attention_kernel import Form
from megatron_bridge.runtime.rope import packed_rotary
from tests.ranks import run_ranks

device.prepare()

LENGTHS = [23, 3, 60, 61, 1, 59, 23]


def _by_formula(q, k, v, lengths, scale, window, sinks):
    """Attention of one sequence after the other, with the softmax written out."""
    outs = []
    for q1, k1, v1 in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        group = q1.shape[1] // k1.shape[1]
        k1, v1 = (x.repeat_interleave(group, 1) for x in (k1, v1))
        logits = torch.einsum("ihd,jhd->hij", q1, k1) * scale
        i, j = torch.arange(len(q1))[:, None], torch.arange(len(q1))
        seen = (j <= i) & (j > i - (window or len(q1)))
        logits = logits.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            column = sinks[:, None, None].expand(-1, len(q1), 1)
            logits = torch.cat([logits, column], -1)
        weights = logits.softmax(-1)[..., : len(q1)]
        outs.append(torch.einsum("hij,jhd->ihd", weights, v1))
    return torch.cat(outs)


@pytest.mark.parametrize("value_dim", [12, 8])
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7, 60])
@pytest.mark.parametrize("lengths", [LENGTHS, [9, 9, 9]])
def test_packed_attention_equals_the_formula(lengths, window, sinks, value_dim):
    torch.manual_seed(0)
    total, scale = sum(lengths), 0.3
    q = torch.randn(total, 6, 12, requires_grad=True)
    k = torch.randn(total, 2, 12, requires_grad=True)
    v = torch.randn(total, 2, value_dim, requires_grad=True)
    logits = torch.randn(6, requires_grad=True) if sinks else None
    wanted = [q, k, v] + ([] if logits is None else [logits])
    upstream = torch.randn(total, 6, value_dim)
    cut = attention.plan(lengths, torch.device("cpu"))
    got = attention.packed_attention(q, k, v, cut, scale, Form(window, logits))
    want = _by_formula(q, k, v, lengths, scale, window, logits)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    mine = torch.autograd.grad((got * upstream).sum(), wanted)
    theirs = torch.autograd.grad((want * upstream).sum(), wanted)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=3e-5, rtol=1e-5)


@dataclass
class _Config:
    """The fields of a TransformerConfig that the parts below read."""

    rotary_interleaved: bool = False
    multi_latent_attention: bool = False
    apply_rope_fusion: bool = False
    context_parallel_size: int = 1
    params_dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    layernorm_zero_centered_gamma: bool = False
    num_attention_heads: int = 6
    num_query_groups: int = 2
    kv_channels: int = 16


class _OneRank:
    size, rank = staticmethod(lambda: 1), staticmethod(lambda: 0)


@pytest.mark.parametrize("scale", [1.0, 1.3])
@pytest.mark.parametrize("rotary", [8, 4])
@pytest.mark.parametrize("interleaved", [True, False])
def test_packed_rotary_equals_megatrons(interleaved, rotary, scale):
    from megatron.core.models.common.embeddings import rope_utils

    torch.manual_seed(0)
    config: Any = _Config(rotary_interleaved=interleaved)
    group: Any = _OneRank
    half = torch.randn(9, 1, 1, rotary // 2)
    frequencies = half.repeat_interleave(2, -1) if interleaved else half.repeat(1, 1, 1, 2)
    offsets = torch.tensor([0, 4, 5, 14]).int()
    x = torch.randn(14, 3, 8, requires_grad=True)
    upstream = torch.randn_like(x)
    results = []
    for apply in (rope_utils.apply_rotary_pos_emb, packed_rotary(_never)):
        out = apply(x, frequencies, config, offsets, scale, group)
        results.append((out, torch.autograd.grad((out * upstream).sum(), x)[0]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def _never(*_args):
    raise AssertionError("the stock form was called")


def test_a_pack_keeps_the_angles_of_both_kinds_of_layers():
    offsets = torch.tensor([0, 4, 5]).int()
    both = torch.randn(4, 1, 1, 16)
    rotate, x = packed_rotary(_never), torch.randn(5, 3, 8)
    for _ in range(3):
        for part in both.chunk(2, -1):
            again = rotate(x, part, _Config(), torch.tensor([0, 4, 5]).int())
            assert torch.equal(rotate(x, part, _Config(), offsets), again)
    assert len(vars(offsets)["_rotary"]) == 2


ROPES = {
    "default": {},
    "linear": {"factor": 8.0},
    "llama3": {
        "factor": 7.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 5.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, every field": {
        "factor": 6.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
    "yarn, factor given": {
        "factor": 6.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.7,
    },
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + i / 7 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    },
}


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_transformers(name, partial):
    from megatron_bridge.runtime.rotary_embedding import frequencies

    kind = name.partition(",")[0]
    parameters = {"rope_type": kind, "rope_theta": 5000.0, **ROPES[name]}
    parameters["partial_rotary_factor"] = partial
    if kind == "longrope":
        for factors in ("short_factor", "long_factor"):
            parameters[factors] = parameters[factors][: int(8 * partial)]
    mine = frequencies(parameters, 16)
    theirs, factor = _huggingface_frequencies(parameters)
    torch.testing.assert_close(mine.inverse, theirs, rtol=1e-6, atol=0)
    assert math.isclose(mine.factor, factor, rel_tol=1e-9)
    if kind == "longrope":
        theirs, _ = _huggingface_frequencies(parameters, seq_len=65)
        assert mine.longer is not None and mine.trained == 64
        torch.testing.assert_close(mine.longer, theirs, rtol=1e-6, atol=0)


def _huggingface_frequencies(parameters, **options):
    if parameters["rope_type"] == "default":
        dim = int(16 * parameters["partial_rotary_factor"])
        return parameters["rope_theta"] ** -(torch.arange(0, dim, 2).float() / dim), 1.0
    config = transformers.LlamaConfig(
        head_dim=16, max_position_embeddings=256, rope_parameters=dict(parameters)
    )
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), **options)


def test_zero_centred_norm_equals_gemmas():
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    from megatron_bridge.runtime.norm import RMSNorm

    torch.manual_seed(0)
    mine = RMSNorm(_Config(layernorm_zero_centered_gamma=True), 12, eps=1e-5)
    assert torch.equal(mine.weight, torch.zeros(12))
    theirs = Gemma3RMSNorm(12, eps=1e-5)
    weight = torch.randn(12)
    x, upstream = torch.randn(5, 1, 12, requires_grad=True), torch.randn(5, 1, 12)
    results = []
    for norm in (mine, theirs):
        norm.weight.data.copy_(weight)
        out = norm(x)
        results.append((out, *torch.autograd.grad((out * upstream).sum(), (x, norm.weight))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def _wide_norms(x, weight, upstream):
    """On each rank: its part of the norm over all heads, and the gradients."""
    from megatron_bridge.runtime.norm import WideKeyNorm, WideQueryNorm

    parallel.initialize(ParallelLayout(tp=2), 0)
    rank, results = parallel.coordinates().tp, []
    for norm, heads in ((WideQueryNorm, 6), (WideKeyNorm, 2)):
        mine = norm(_Config(), 4, eps=1e-5)
        own = slice(rank * heads // 2, (rank + 1) * heads // 2)
        mine.weight.data.copy_(weight[: heads * 4].view(heads, 4)[own].flatten())
        marks = vars(mine.weight)
        assert marks["tensor_model_parallel"] and marks["partition_dim"] == 0
        part = x[..., :heads, :][..., own, :].clone().requires_grad_()
        out = mine(part)
        sum_ = (out * upstream[..., :heads, :][..., own, :]).sum()
        gradients = torch.autograd.grad(sum_, (part, mine.weight))
        results.append([out.detach(), *gradients])
    return results


def test_a_norm_over_all_heads_is_cut_over_ranks():
    torch.manual_seed(0)
    x, upstream, weight = torch.randn(5, 1, 6, 4), torch.randn(5, 1, 6, 4), torch.randn(24)
    ranks = run_ranks(_wide_norms, 2, x, weight, upstream)
    for index, heads in enumerate((6, 2)):
        whole, scale = x[..., :heads, :].clone().requires_grad_(), weight[: heads * 4].clone()
        out = F.rms_norm(whole.flatten(-2), (heads * 4,), scale.requires_grad_(), 1e-5)
        out = out.view(whole.shape)
        gradients = torch.autograd.grad((out * upstream[..., :heads, :]).sum(), (whole, scale))
        joined = [torch.cat([rank[index][i] for rank in ranks], dim) for i, dim in WIDE]
        for one, other in zip(joined, (out, *gradients), strict=True):
            torch.testing.assert_close(one, other)


# The output, the input's gradient and the weight's, with the dimension that holds the heads.
WIDE = ((0, -2), (1, -2), (2, 0))
