"""JSON-lines files that survive a crash: torn last lines, truncation, numbers JSON cannot spell.

JSON has no NaN and no infinity. They are written as the strings "NaN", "Infinity" and
"-Infinity", so every line is valid JSON for any reader; ``decode_numbers`` turns them back.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

Row = dict[str, Any]
TAIL_BLOCK = 1 << 20
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain(value: Any, where: str = "value") -> Any:
    """``value`` as JSON types: NumPy and torch scalars and arrays unpacked, NaN spelled out.

    Raises TypeError naming ``where`` for a value that JSON has no form for.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _spell(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "tolist"):
        return plain(value.tolist(), where)
    raise TypeError(f"{where}: a {type(value).__name__} has no JSON form")


def _spell(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def decode_numbers(values: Mapping[str, Any]) -> Row:
    """The mapping with "NaN", "Infinity" and "-Infinity" as floats again."""
    return {
        key: NON_FINITE.get(item, item) if isinstance(item, str) else item
        for key, item in values.items()
    }


def encode(row: Mapping[str, Any]) -> str:
    """One JSON line, newline included."""
    return json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n"


def open_append(path: Path) -> TextIO:
    """The file open for appending; a lone surrogate in a text becomes its JSON escape."""
    return path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of the file, in order; a torn last line is left out, a missing file is empty.

    Raises ValueError with file and line for a broken line anywhere else.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            row = parse_line(line, path, number)
            if row is not None:
                yield row


def parse_line(line: bytes, path: Path, number: int | str) -> Row | None:
    """The line's row; None for a blank line, or for one torn off before its newline."""
    if not line.strip():
        return None
    try:
        row = json.loads(line)
    except ValueError as error:
        if not line.endswith(b"\n"):
            return None
        raise ValueError(
            f"{path}:{number}: not a JSON line ({error}). "
            "Remove the line, or restore the file from a copy."
        ) from error
    if not isinstance(row, dict):
        raise ValueError(f"{path}:{number}: holds {type(row).__name__}, a JSON object is needed.")
    return row


def lines_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """The file's lines, last first, each with the place at which it begins."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        rest = b""
        while end > 0:
            start = max(0, end - TAIL_BLOCK)
            file.seek(start)
            block = file.read(end - start) + rest
            place = start + len(block)
            lines = block.splitlines(keepends=True)
            rest = lines.pop(0) if start > 0 else b""
            for line in reversed(lines):
                place -= len(line)
                yield place, line
            end = start


def cut_tail(path: Path, keep: Callable[[Row], bool]) -> None:
    """Cut the file after the last row that ``keep`` accepts, and so a torn last line too.

    Only what goes is read: the file of a long run is too large to be written anew.
    """
    if not path.exists():
        return
    end, whole = 0, True
    for place, line in lines_backwards(path):
        row = parse_line(line, path, "near the end")
        if row is not None and keep(row):
            end, whole = place + len(line), line.endswith(b"\n")
            break
    with path.open("r+b") as file:
        file.truncate(end)
        if not whole:
            file.seek(end)
            file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())
