"""One line of JSONL, read alike by the check and by the run."""

import json
from typing import Any


def json_row(line: bytes) -> dict[str, Any]:
    """The row that a line holds.

    Raises:
        ValueError: why it holds none, with the byte or the character where that is known.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 at byte {error.start} of the line (0x{line[error.start]:02x}); save the "
            "file as UTF-8"
        ) from error
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.colno}") from error
    except ValueError as error:  # Python reads no number of thousands of digits
        raise ValueError(f"not JSON: {str(error).partition(';')[0]}") from error
    except RecursionError as error:
        raise ValueError("not JSON: its brackets are nested too deep") from error
    if not isinstance(row, dict):
        raise ValueError(f"a row is a JSON object ({{...}}), not a {type(row).__name__}")
    if "\\ud" in text or "\\uD" in text:
        _check_characters(row)
    return row


def _check_characters(row: dict[str, Any]) -> None:
    """Escapes may write half of a surrogate pair, which no tokenizer takes."""
    for column, value in row.items():
        try:
            json.dumps([column, value], ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise ValueError(
                f"column '{ascii(column)[1:-1]}' has {half}, half of a surrogate pair and no "
                "character; write the pair, or U+FFFD"
            ) from error
