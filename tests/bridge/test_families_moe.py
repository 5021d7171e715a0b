"""Families with experts: a parallel Megatron model computes what transformers' own class does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.layout import ParallelLayout
from tests.bridge import families_moe, parity, tiny
from tests.ranks import run_ranks

LAYOUTS = {
    "tp1": ParallelLayout(),
    "tp2": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "tp2pp2": ParallelLayout(tp=2, pp=2),
    "ep2": ParallelLayout(dp=2, ep=2),
    "etp2": ParallelLayout(tp=2, etp=2),
    "ep2tp2": ParallelLayout(tp=2, dp=2, ep=2),
}
FURTHER = {
    "ep2-within-tp2": ParallelLayout(tp=2, ep=2, etp=1),
    "whole-experts-tp2": ParallelLayout(tp=2, etp=1),
    "etp2-of-dp2": ParallelLayout(dp=2, etp=2),
    "uneven-pp2": ParallelLayout(pp=2, first_stage_layers=1),
    "pp2vpp2": ParallelLayout(pp=2, vpp=2),
    "ep2pp2": ParallelLayout(pp=2, dp=2, ep=2),
}
# Variants of a table that another family proves at every layout.
_VARIANTS = ("deepseek_v2_lite", "moonlight")
_OF_VARIANTS = ("tp1", "ep2tp2")


def _cases() -> list[Any]:
    cases = []
    for kind in families_moe.CONFIGS:
        for layout in LAYOUTS | FURTHER:
            quick = layout in (_OF_VARIANTS if kind in _VARIANTS else LAYOUTS)
            marks = () if quick else (pytest.mark.slow,)
            cases.append(pytest.param(kind, layout, marks=marks))
    return cases


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[[str], tuple[Path, parity.Wanted]]:
    known: dict[str, tuple[Path, parity.Wanted]] = {}

    def make(kind: str) -> tuple[Path, parity.Wanted]:
        if kind not in known:
            model = families_moe.model(kind)
            wanted = families_moe.wanted(model, tmp_path_factory.mktemp("gradients"))
            known[kind] = tiny.save(model, tmp_path_factory.mktemp("hf")), wanted
        return known[kind]

    return make


@pytest.mark.parametrize(("kind", "layout"), _cases())
def test_logits_gradients_and_export_equal_huggingface(made, kind, layout):
    folder, wanted = made(kind)
    shape = (LAYOUTS | FURTHER)[layout]
    parity.check(run_ranks(parity.compare, shape.world, folder, shape, wanted))
