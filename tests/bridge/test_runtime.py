"""The CPU layer against the installed megatron-core, and attention over packs."""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from megatron_bridge.runtime import attention, cpu_layer, device


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
