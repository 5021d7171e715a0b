"""The reference pages are what their program writes, and what the guides show is sound."""

import re
import runpy
from pathlib import Path

import pytest

from hybridflow.recipe.graph_check import type_faults
from hybridflow.recipe.graph_load import parse_graph
from hybridflow.recipe.load import read_draft
from hybridflow.recipe.source import parse_yaml

DOCS = Path(__file__).parents[2] / "docs"
PAGES = runpy.run_path(str(DOCS / "generate_reference.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_reference_pages_are_current(name: str):
    written = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert written == PAGES[name](), "run: python docs/generate_reference.py"


def test_the_page_of_models_is_current():
    made = runpy.run_path(str(DOCS / "generate_models.py"))["models_page"]()
    assert (DOCS / "models.md").read_text(encoding="utf-8") == made, (
        "run: python docs/generate_models.py"
    )


def test_examples_of_the_guides_are_sound(tmp_path: Path):
    block = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
    recipe = block.findall((DOCS / "recipes.md").read_text())[0]
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert read_draft(tmp_path / "recipe.yaml").faults == []
    source = parse_yaml(block.findall((DOCS / "dataflow.md").read_text())[0], "dataflow.md")
    graph, faults = parse_graph(source.data, source.origin)
    kinds = {"actor": "model", "rollout": "rollout", "reward": "reward"}
    assert graph is not None and faults + type_faults(graph, kinds, ["actor"]) == []
