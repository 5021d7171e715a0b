"""What the documentation names exists: pages, anchors, commands, keys of recipes, files.

No test here imports torch: a change of words is quick to test.
"""

import re
from pathlib import Path

import pytest

from hybridflow import cli
from hybridflow.recipe.load import load_recipe
from tests.docs import pages
from tests.docs.pages import PAGES, ROOT

MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_links_resolve(page: Path):
    broken = []
    for link in pages.links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in pages.anchors(target)):
            broken.append(link)
    assert not broken


def test_paths_exist(page: Path):
    missing = [path for path in pages.paths(page) if not (ROOT / path).exists()]
    assert not missing


def test_make_targets_exist(page: Path):
    named = [text.split() for text in pages.inline(page) if text.startswith("make ")]
    lines = [*named, *(line for line in pages.commands(page) if line[0] == "make")]
    targets = {word for line in lines for word in line[1:] if "=" not in word}
    assert targets <= MAKE_TARGETS


def test_commands_in_prose_exist(page: Path):
    for text in pages.inline(page):
        words = text.split()
        if words[0] == "hybridflow" and len(words) > 1:
            assert words[1] in cli.COMMANDS or words[1].startswith("--"), text


def test_command_lines_parse(page: Path):
    """Sub-command, flags, and for a recipe of ours the keys and values of the overrides too."""
    for line in pages.commands(page):
        if line[0] != "hybridflow":
            continue
        try:
            args = cli.parse(line[1:])
        except SystemExit:
            pytest.fail(f"does not parse: {' '.join(line)}")
        recipe = ROOT / getattr(args, "recipe", "")
        if recipe.is_file():
            load_recipe(recipe, args.overrides)


def test_index_names_every_page():
    named = {(ROOT / "docs" / link).resolve() for link in pages.links(ROOT / "docs/index.md")}
    beside = {page for page in (ROOT / "docs").rglob("*.md") if "reference" not in page.parts}
    assert beside - named == {ROOT / "docs/index.md"}


def test_readme_keeps_the_promised_blocks():
    text = (ROOT / "README.md").read_text()
    block = text[text.index("<!-- run-output -->") : text.index("<!-- /run-output -->")]
    assert re.search(r"^main \d+/\d+  reward ", block, re.MULTILINE)
    assert "make run" in text.split("## What it looks like")[0]
    assert "make test" in text.split("## What it looks like")[0]
