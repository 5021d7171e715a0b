"""The pages of the documentation and what they name: links, commands, paths."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
_SHELLS = ("bash", "sh", "console", "shell")
_OURS = ("hybridflow", "megatron_bridge", "recipes", "docs", "tests", "launch", "benchmarks")
_PATH = re.compile(rf"(?:{'|'.join(_OURS)})/[\w./-]*")


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> Iterator[str]:
    """Targets of links and pictures that lie in the repository."""
    for target in _LINK.findall(prose(page)):
        if "://" not in target and not target.startswith("mailto:"):
            yield target


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the page's headings."""
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for title in _HEADING.findall(prose(page)))
    return {title.strip().replace(" ", "-") for title in titles}


def inline(page: Path) -> list[str]:
    """Inline code outside of fenced blocks."""
    return _CODE.findall(prose(page))


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command line in the page's shell blocks, comments left out."""
    for language, block in _FENCE.findall(page.read_text(encoding="utf-8")):
        if language not in _SHELLS:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words:
                yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


def paths(page: Path) -> Iterator[str]:
    """Paths of the repository in inline code and command lines."""
    named = [*inline(page), *(word for line in commands(page) for word in line)]
    yield from (text for text in named if _PATH.fullmatch(text) and "=" not in text)
