"""The CPU layer against the installed megatron-core, and attention over packs."""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from megatron_bridge.runtime import attention, cpu_layer, device
from megatron_bridge.runtime.norm import RMSNorm
from megatron_bridge.runtime.rope import packed_rotary


def test_every_patch_fits_the_installed_megatron_core():
    assert cpu_layer.verify() == {}
    device.prepare()
    assert cpu_layer.verify() == {}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"needles": ("text that is gone",)}, "no longer has"),
        ({"target": "gone"}, "does not exist"),
        ({"module": "megatron.core.gone"}, "cannot be imported"),
    ],
)
def test_a_changed_target_is_told(changes, problem):
    fields = {f: getattr(cpu_layer.PATCHES[0], f) for f in cpu_layer.Patch.__dataclass_fields__}
    assert problem in str(cpu_layer.Patch(**{**fields, "name": "other", **changes}).problem())


def test_dtypes_are_named():
    assert device.dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ValueError, match=r"'float16' is not supported; choose one of"):
        device.dtype("float16")


def _one_by_one(q, k, v, lengths):
    outs = []
    for rows in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        q1, k1, v1 = (x.transpose(0, 1)[None] for x in rows)
        outs.append(F.scaled_dot_product_attention(q1, k1, v1, is_causal=True, enable_gqa=True))
    return torch.cat([out[0].transpose(0, 1) for out in outs])


@pytest.mark.parametrize(
    "lengths",
    [[7], [1], [5, 5, 5], [3, 1, 8, 8, 2], [100, 3, 60, 61, 1, 99, 20], "random"],
)
def test_packed_attention_equals_one_sequence_at_a_time(lengths):
    if lengths == "random":
        generator = random.Random(1)
        lengths = [generator.randint(1, 150) for _ in range(40)]
    torch.manual_seed(0)
    total = sum(lengths)
    q = torch.randn(total, 6, 8, requires_grad=True)
    k, v = (torch.randn(total, 3, 8, requires_grad=True) for _ in range(2))
    upstream = torch.randn(total, 6, 8)
    cut = attention.plan(lengths, torch.device("cpu"))
    got = attention.packed_attention(q, k, v, cut, 1 / math.sqrt(8))
    want = _one_by_one(q, k, v, lengths)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    mine = torch.autograd.grad((got * upstream).sum(), (q, k, v))
    theirs = torch.autograd.grad((want * upstream).sum(), (q, k, v))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_plan_bounds_calls_and_padding():
    generator = random.Random(2)
    lengths = [generator.randint(1, 2000) for _ in range(300)]
    cut = attention.plan(lengths, torch.device("cpu"))
    padded = sum(bucket.rows * bucket.length for bucket in cut.buckets)
    assert len(cut.buckets) < 25
    assert padded < 1.25 * sum(lengths)


@pytest.mark.parametrize("lengths", [[7], [4, 1, 9], [3, 3]])
def test_packed_rotary_equals_megatrons(lengths):
    from megatron.core.models.common.embeddings import rope_utils

    class Config:
        rotary_interleaved = multi_latent_attention = apply_rope_fusion = False
        context_parallel_size = 1

    class Group:
        size, rank = staticmethod(lambda: 1), staticmethod(lambda: 0)

    torch.manual_seed(0)
    frequencies = torch.randn(max(lengths), 1, 1, 4).repeat(1, 1, 1, 2)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    x = torch.randn(sum(lengths), 3, 8, requires_grad=True)
    upstream = torch.randn_like(x)
    results = []
    for apply in (rope_utils.apply_rotary_pos_emb, packed_rotary(_never)):
        out = apply(x, frequencies, Config, cu_seqlens=offsets, cp_group=Group)
        results.append((out, torch.autograd.grad((out * upstream).sum(), x)[0]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def _never(*_args):
    raise AssertionError("the stock form was called")


@pytest.mark.parametrize("shape", [(5, 1, 8), (6, 3, 8)])
def test_rms_norm_equals_torchs(shape):
    class Config:
        params_dtype, sequence_parallel = torch.float32, False
        layernorm_zero_centered_gamma = False

    torch.manual_seed(0)
    norm = RMSNorm(Config, 8, eps=1e-5)
    norm.weight.data.normal_()
    x = torch.randn(shape, requires_grad=True)
    upstream = torch.randn(shape)
    results = []
    for out in (norm(x), F.rms_norm(x, (8,), norm.weight, 1e-5)):
        gradients = torch.autograd.grad((out * upstream).sum(), (x, norm.weight))
        results.append((out, *gradients))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
