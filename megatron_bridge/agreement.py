"""Whether a checkpoint's tensors are those that its config.json asks for."""

from collections.abc import Collection, Mapping
from pathlib import Path

from megatron_bridge.registry import HfConfig, architecture, uncovered
from megatron_bridge.source import Source

_SHOWN = 40


def check_tensors(
    source: Source,
    config: HfConfig,
    expected: Mapping[str, tuple[int, ...]],
    folder: str | Path,
    passed: Collection[str] = (),
) -> None:
    """Compare names and shapes with the architecture's table.

    Args:
        source: of HuggingFace tensors.
        config: resolved.
        expected: shapes that the table asks for.
        folder: for the text of the error.
        passed: names that may be there and are not read.

    Raises:
        ValueError: listing everything that is missing, unknown or of another shape.
    """
    table, present = architecture(config), source.tensors()
    found = [f"'{name}' is missing" for name in expected if name not in present]
    for name in sorted(present.keys() - expected.keys()):
        if name not in passed and not table.is_ignored(name, config):
            found.append(_unknown(name, config))
    for name in expected.keys() & present.keys():
        shape = tuple(present[name].shape)
        if shape != expected[name]:
            found.append(f"'{name}' has shape {shape}, config.json asks for {expected[name]}")
    if found:
        more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        shown = "\n".join(f"- {one}" for one in found[:_SHOWN] + more)
        raise ValueError(f"{folder} does not fit its config.json:\n{shown}")


def _unknown(name: str, config: HfConfig) -> str:
    table = architecture(config)
    known = table.patterns(config)
    if any(_same_but_number(name, pattern) for pattern in known):
        return f"'{name}' is of a layer or expert that config.json does not count"
    return uncovered("HuggingFace tensor", name, known, table)


def _same_but_number(name: str, pattern: str) -> bool:
    pieces, wanted = name.split("."), pattern.split(".")
    return len(pieces) == len(wanted) and all(
        a == b or (a.isdigit() and b.startswith("{")) for a, b in zip(pieces, wanted, strict=True)
    )
