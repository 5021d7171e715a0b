"""Versions of a tiny model in training, written as deltas."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.weight_sync.delta import VersionWriter
from hybridflow.weight_sync.delta_manifest import WEIGHTS
from tests.tiny_models import make_model

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("model") / "source")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


@pytest.fixture
def writer(source: Path, shared: Path, tmp_path: Path) -> Iterator[VersionWriter]:
    writer = VersionWriter(shared, source, tmp_path, full_every=4)
    yield writer
    writer.close()


def read_weights(folder: Path) -> Weights:
    return load_file(folder / WEIGHTS)


def stepped(weights: Weights, seed: int, share: float = 0.02) -> Weights:
    """As after a step of a small learning rate: a share of the numbers, moved to a near one."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in weights.items():
        mask = torch.rand(tensor.shape, generator=generator) < share
        moved[name] = torch.where(mask, (tensor * 1.01).to(tensor.dtype), tensor)
    return moved


def same_bits(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[n].view(torch.uint8), second[n].view(torch.uint8)) for n in first
    )


@pytest.fixture
def three(writer: VersionWriter, source: Path, shared: Path) -> list[Weights]:
    """Versions 1 (full), 2 and 3 (deltas) in `shared`."""
    made = [read_weights(source)]
    made += [stepped(made[0], 1)]
    made += [stepped(made[1], 2)]
    for version, weights in enumerate(made, start=1):
        writer.write(weights.items(), version)
    return made
