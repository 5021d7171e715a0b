"""Writes the tables of docs/models.md from the bridge's registry: python docs/generate_models.py

A test fails when the page is not what this program would write.
"""

import importlib
import re
from pathlib import Path

from megatron_bridge import registry
from megatron_bridge.registry import Architecture

PAGE = Path(__file__).parent / "models.md"
_TABLE = re.compile(r"(<!-- (\w+): written by [^>]*-->\n(?:\|.*\n){2})(?:\|.*\n)*(<!-- end -->)")


def models_page() -> str:
    """The page, with its tables as the registry has them."""
    rows = {"architectures": _row, "fields": _fields}

    def written(table: re.Match[str]) -> str:
        lines = [rows[table[2]](one) + "\n" for one in registry.tables()]
        return table[1] + "".join(lines) + table[3]

    page, count = _TABLE.subn(written, PAGE.read_text(encoding="utf-8"))
    assert count == len(rows), f"{PAGE} lacks the marks of its tables"
    return page


def _row(table: Architecture) -> str:
    names = ", ".join(f"`{name}`" for name in (table.name, *table.aliases))
    return f"| {names} | {table.models} | {_described(table)} |"


def _described(table: Architecture) -> str:
    module = importlib.import_module(f"megatron_bridge.models.{registry.module_of(table)}")
    first = (module.__doc__ or "").strip().splitlines()[0].rstrip(".")
    return first.partition(": ")[2] or first


def _fields(table: Architecture) -> str:
    fields = [
        f"`{field}`: {' or '.join(f'`{value!r}`' for value in values)}"
        for field, values in sorted(table.required.items())
    ]
    return f"| {table.name} | {'; '.join(fields)} |"


def main() -> None:
    """Write the page."""
    PAGE.write_text(models_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
