"""HuggingFace checkpoints seen as Megatron's and back; who reads how much."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bridge import live, regions, translation
from megatron_bridge.huggingface.folder import HuggingFaceFolder
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.live_model import placement
from megatron_bridge.mappings import weights
from megatron_bridge.reading import read_megatron
from megatron_bridge.sharding import holdings
from megatron_bridge.source import TensorInfo, whole
from megatron_bridge.views import HuggingFaceAsMegatron, MegatronAsHuggingFace, chunks
from tests.bridge import families_dense, families_moe, parity, tiny
from tests.ranks import run_ranks


class Memory:
    """Tensors in memory as a source."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self.held = held

    def tensors(self):
        return {name: TensorInfo(t.dtype, tuple(t.shape)) for name, t in self.held.items()}

    def read(self, name, ranges):
        return self.held[name][regions.slices(ranges)]


MODELS: dict[str, Any] = {
    "untied": lambda: tiny.model("qwen3"),
    "tied": lambda: tiny.model("qwen3", tied=True),
}
FAMILIES: dict[str, Any] = {
    **{kind: partial(families_dense.model, kind) for kind in families_dense.CONFIGS},
    **{kind: partial(families_moe.model, kind) for kind in families_moe.CONFIGS},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory) -> Path:
    return tiny.save(MODELS[request.param](), tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> Path:
    return tiny.save(FAMILIES[request.param](), tmp_path_factory.mktemp(request.param))


def _all(source: Any) -> dict[str, torch.Tensor]:
    return {
        name: source.read(name, whole(info.shape)).clone()
        for name, info in source.tensors().items()
    }


def test_there_and_back_is_bit_identical(folder):
    source = HuggingFaceFolder(folder)
    there = _all(HuggingFaceAsMegatron(source, source.config(), ParallelLayout(tp=4)))
    back = _all(MegatronAsHuggingFace(Memory(there), source.config()))
    wanted = parity.read_all(folder)
    assert back.keys() == wanted.keys()
    assert all(torch.equal(back[name], wanted[name]) for name in wanted)


def test_rectangles_equal_the_whole(folder):
    source = HuggingFaceFolder(folder)
    seen = HuggingFaceAsMegatron(source, source.config(), ParallelLayout(tp=4))
    everything = _all(seen)
    generator = torch.Generator().manual_seed(1)
    back = MegatronAsHuggingFace(Memory(everything), source.config())
    for one, held in ((seen, everything), (back, _all(back))):
        for name, tensor in held.items():
            ranges = []
            for size in tensor.shape[:-1] if tensor.dim() > 1 else tensor.shape:
                a, b = sorted(torch.randint(0, size + 1, (2,), generator=generator).tolist())
                ranges.append((a, b) if a < b else (0, size))
            if tensor.dim() > 1:
                ranges.append((0, tensor.shape[-1]))
            found = one.read(name, tuple(ranges))
            assert torch.equal(found, tensor[regions.slices(tuple(ranges))]), (name, ranges)


def test_every_family_comes_back_bit_for_bit_with_the_same_keys(family):
    source = HuggingFaceFolder(family)
    there = _all(HuggingFaceAsMegatron(source, source.config(), ParallelLayout(tp=2)))
    back = _all(MegatronAsHuggingFace(Memory(there), source.config()))
    wanted = parity.read_all(family)
    assert back.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name


def test_the_chunks_of_every_family_hold_each_element_once(family):
    source = HuggingFaceFolder(family)
    experts = any("expert" in name for name in source.tensors())
    layout = ParallelLayout(tp=2, pp=2, dp=2, ep=2 if experts else 1)
    infos = HuggingFaceAsMegatron(source, source.config(), layout).tensors()
    _check_cover(infos, list(chunks(source.config(), layout)))


def test_the_keys_of_every_family_are_those_that_megatron_saves(family):
    source = HuggingFaceFolder(family)
    seen = HuggingFaceAsMegatron(source, source.config(), ParallelLayout()).tensors()
    (found,) = run_ranks(_keys, 1, family, ParallelLayout())
    assert found == {name: info.shape for name, info in seen.items()}


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(),
        ParallelLayout(tp=2, pp=2),
        ParallelLayout(tp=4, pp=4),
        ParallelLayout(pp=2, vpp=2),
    ],
    ids=str,
)
def test_the_chunks_of_a_layout_hold_each_element_once(folder, layout):
    source = HuggingFaceFolder(folder)
    infos = HuggingFaceAsMegatron(source, source.config(), layout).tensors()
    _check_cover(infos, list(chunks(source.config(), layout)))


def _check_cover(infos: Any, found: list) -> None:
    boxes: dict[str, list] = {name: [] for name in infos}
    for key, ranges in found:
        boxes[key].append(ranges)
    for key, held in boxes.items():
        assert regions.clash(held) is None
        assert regions.uncovered(whole(infos[key].shape), held) is None


def _keys(folder: Path, layout: ParallelLayout) -> dict[str, tuple[int, ...]]:
    """What stock code saves of the live model: keys and shapes."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    (model,) = parity.build(folder, layout)
    found: dict[str, tuple[int, ...]] = {}

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            for inner in value.values():
                visit(inner)
        elif isinstance(value, list):
            for inner in value:
                visit(inner)
        elif isinstance(value, ShardedTensor):
            found[value.key] = tuple(value.global_shape)

    state = model.sharded_state_dict()  # type: ignore[operator]
    apply_factories(state)
    visit(state)
    return found


def test_keys_and_shapes_are_those_that_megatron_saves(folder):
    source = HuggingFaceFolder(folder)
    for layout in (ParallelLayout(), ParallelLayout(tp=2, pp=2)):
        seen = HuggingFaceAsMegatron(source, source.config(), layout).tensors()
        found: dict[str, tuple[int, ...]] = {}
        for one in run_ranks(_keys, layout.world, folder, layout):
            found |= one
        assert found == {name: info.shape for name, info in seen.items()}


class _Counting(Memory):
    """Counts the bytes that are asked for."""

    bytes = 0

    def read(self, name, ranges):
        self.bytes += regions.volume(ranges) * self.held[name].element_size()
        return super().read(name, ranges)


def test_a_rank_asks_for_its_own_bytes_alone(folder):
    config = translation.resolve(live.load_hf_config(folder))
    held = parity.read_all(folder)
    total = sum(t.numel() * t.element_size() for t in held.values())
    replicated = sum(t.numel() * t.element_size() for n, t in held.items() if "norm" in n)
    layout = ParallelLayout(tp=2, pp=2)
    where = placement(config, layout)
    asked = []
    for rank in range(layout.world):
        source, own = _Counting(held), 0
        for weight in weights(config):
            place = where.place(weight, rank)
            if place is None:
                continue
            for holding in holdings(weight, 2, place[1]):
                own += read_megatron(source, weight, holding.box).nbytes
        asked.append(source.bytes)
        assert source.bytes <= own
    assert sum(asked) == total + replicated
    assert max(asked) < 0.45 * total


def test_tensors_of_two_dtypes_in_one_megatron_tensor_are_refused(folder):
    held = dict(parity.read_all(folder))
    name = "model.layers.1.self_attn.k_proj.weight"
    held[name] = held[name].bfloat16()
    with pytest.raises(ValueError, match=r"linear_qkv.weight' differ in dtype.*bfloat16.*float32"):
        HuggingFaceAsMegatron(Memory(held), live.load_hf_config(folder))
