"""Names that a test registers are gone after it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow import algorithms, rewards
from hybridflow.recipe import catalogue

_REGISTRIES = (
    *(catalogue.FUNCTIONS, catalogue.LOSSES, catalogue.REWARDS),
    *(algorithms.FUNCTIONS, algorithms.LOSSES, rewards.REWARDS),
)
GUIDE = Path(__file__).parents[1] / "docs" / "dataflow.md"


@pytest.fixture
def own_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registries, and the modules that a recipe's `imports` names, are as they were before."""
    for registry in _REGISTRIES:
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
        monkeypatch.setattr(registry, "aliases", dict(registry.aliases))
    yield
    for name in [name for name in sys.modules if name.startswith(("hybridflow_own_", "own_"))]:
        del sys.modules[name]


def guide_code(language: str) -> list[str]:
    """The guide's blocks of code about a loss and a function of one's own."""
    section = GUIDE.read_text(encoding="utf-8").partition("## A loss or a function of your own")[2]
    blocks = section.partition("\n## ")[0].split("```")[1::2]
    return [text.removeprefix(f"{language}\n") for text in blocks if text.startswith(language)]
