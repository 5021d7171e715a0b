"""Byte sizes as people write them. Imports no torch."""

import re

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_MOST = 2.0**63
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Bytes of ``4GiB``, ``5GB``, ``1.5 MiB`` or ``1048576``.

    Raises:
        ValueError: when the text is no size above zero.
    """
    found = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(found.group(2).upper()) if found else None
    size = float(found.group(1)) * factor if found and factor else 0.0
    if not 1 <= size < _MOST:
        raise ValueError(f"'{text}' is not a size; write it like 4GiB, 512MiB or 5GB")
    return int(size)


def show_bytes(count: int | float) -> str:
    """``count`` bytes for people: 1.50 GB (decimal, as disks and networks count)."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def show_binary(count: int) -> str:
    """``count`` bytes for people: 512 MiB (binary, as memory is counted), rounded up."""
    return f"{-(-count // 2**20)} MiB"
