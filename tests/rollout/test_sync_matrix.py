"""Live Megatron ranks of many layouts publish to real servers over every transport.

One of these, to SGLang on two ranks, is in ``test_loader_sglang.py``, on a server that others
share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_bridge.layout import ParallelLayout
from tests.rollout.sync_matrix import DIRECT, LOCAL_WAYS, WAYS, Served, check_way, served
from tests.tiny_models import make_model
from tests.weight_sync.trainer import Trainer

TP2_PP2 = ParallelLayout(tp=2, pp=2, last_stage_layers=1)
PP2_DP2 = ParallelLayout(pp=2, dp=2, last_stage_layers=1)
EP2 = ParallelLayout(dp=2, ep=2)
EP2_PP2 = ParallelLayout(dp=2, ep=2, pp=2, last_stage_layers=1)
TIED = {"tie_word_embeddings": True}


class Model(NamedTuple):
    """A tiny model, and the layouts of its trainer; the first publishes over every transport."""

    family: str
    changes: dict[str, Any]
    layouts: tuple[ParallelLayout, ...]
    dtype: str = "float32"


MODELS = {
    "dense": Model("qwen3", {}, (TP2_PP2, PP2_DP2)),
    "tied": Model("llama", TIED, (PP2_DP2, TP2_PP2)),
    "experts": Model("qwen3_moe", {}, (EP2, TP2_PP2, PP2_DP2)),
    "tied-experts": Model("qwen3_moe", TIED, (EP2_PP2,)),
    "bfloat16": Model("qwen3", {}, (TP2_PP2,), "bfloat16"),
}
NOT_SERVED = {("tied-experts", "sglang"), ("tied-experts", "sglang-tp2")}
"""SGLang has no such model; see ``NEVER_TIED``."""
SERVERS = {"local": ("local", 1), "sglang": ("sglang", 1), "sglang-tp2": ("sglang", 2)}


def cases() -> Iterator[Any]:
    """Model, server, layout and transport; those of one server, then of one trainer, together."""
    for name, model in MODELS.items():
        for kind in SERVERS:
            if (name, kind) in NOT_SERVED:
                continue
            server = (name, kind)  # one object: a fixture is made anew for another
            marks = [pytest.mark.sglang] if kind != "local" else []
            every = LOCAL_WAYS if kind == "local" else tuple(WAYS)
            for layout in model.layouts:
                trainer = (name, layout)
                for way in every if layout == model.layouts[0] else DIRECT:
                    id = f"{name}-{layout}-{kind}-{way}"
                    yield pytest.param(server, trainer, way, id=id, marks=marks)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each model."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: make_model(folder / name, model.family, **model.changes)
        for name, model in MODELS.items()
    }


@pytest.fixture(scope="module")
def server(
    request: Any, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    name, kind = request.param
    engine, tp = SERVERS[kind]
    work = tmp_path_factory.mktemp("server")
    with served(engine, models[name], work, tp, MODELS[name].dtype) as running:
        yield running


@pytest.fixture(scope="module")
def trainer(request: Any, models: dict[str, Path]) -> Iterator[Trainer]:
    name, layout = request.param
    with closing(Trainer(models[name], layout, MODELS[name].dtype)) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("server", "trainer", "way"), cases(), indirect=["server", "trainer"], scope="module"
)
def test_published_is_loaded_from_disk(
    server: Served, trainer: Trainer, way: str, tmp_path: Path
) -> None:
    check_way(trainer, server, way, tmp_path)
