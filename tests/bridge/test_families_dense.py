"""Dense families and GPT-OSS: a parallel Megatron model computes what transformers' class does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.layout import ParallelLayout
from tests.bridge import families_dense, parity, tiny
from tests.ranks import run_ranks

LAYOUTS = {
    "tp1": ParallelLayout(),
    "tp2": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "tp2pp2": ParallelLayout(tp=2, pp=2),
}
EXPERTS = {
    "ep2": ParallelLayout(dp=2, ep=2),
    "etp2": ParallelLayout(tp=2, etp=2),
    "ep2tp2": ParallelLayout(tp=2, dp=2, ep=2),
    "ep2-within-tp2": ParallelLayout(tp=2, ep=2, etp=1),
    "pp2vpp2": ParallelLayout(pp=2, vpp=2),
}
QUICK = ("tp1", "tp2pp2", "etp2", "ep2tp2")


def _cases() -> list[Any]:
    cases = []
    for kind in families_dense.CONFIGS:
        for layout in LAYOUTS | (EXPERTS if kind == "gpt_oss" else {}):
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
