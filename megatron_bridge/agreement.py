"""Whether a checkpoint's tensors are those that its config.json asks for."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import equal

from megatron_bridge.mappings import weights
from megatron_bridge.registry import HfConfig, architecture, tied, uncovered
from megatron_bridge.source import Source

_SHOWN = 40
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_ROWS = 1024  # of a vocabulary, compared at a time


def check_tensors(
    source: Source,
    config: HfConfig,
    expected: Mapping[str, tuple[int, ...]],
    folder: str | Path,
    passed: Collection[str] = (),
) -> None:
    """Compare names, shapes and kinds of numbers with the architecture's table.

    Where the config ties the output layer to the embedding, and the checkpoint has both, their
    values are compared too: transformers takes two that differ for two layers.

    Args:
        source: of HuggingFace tensors.
        config: resolved.
        expected: shapes that the table asks for.
        folder: for the text of the error.
        passed: names that may be there and are not read.

    Raises:
        ValueError: listing everything that is missing, unknown, of another shape, or of whole
            numbers.
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
        elif not present[name].dtype.is_floating_point:
            found.append(
                f"'{name}' holds whole numbers ({present[name].dtype}): quantised weights, whose "
                "meaning config.json does not say; use the model's bfloat16 checkpoint"
            )
    if tied(config) and not found and _EMBEDDING in expected and not _is_tied(source):
        found.append(
            f"'{_OUTPUT}' differs from '{_EMBEDDING}', and config.json ties them; set "
            f"tie_word_embeddings to false there, or remove '{_OUTPUT}'"
        )
    if found:
        more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        shown = "\n".join(f"- {one}" for one in found[:_SHOWN] + more)
        raise ValueError(f"{folder} does not fit its config.json:\n{shown}")


_MODEL = ("embedding.", "decoder.", "output_layer.")
"""Begins the key of each weight in a Megatron checkpoint; optimizer states begin elsewhere."""


def check_keys(present: Collection[str], config: HfConfig, folder: str | Path) -> None:
    """Make sure that config.json accounts for every weight of a Megatron checkpoint.

    Args:
        present: its keys.
        config: resolved.
        folder: for the text of the error.

    Raises:
        ValueError: listing weights that would be left out: config.json is of another model.
    """
    held = {weight.key for weight in weights(config)}
    stacked = {_stacked(key) for key in held}
    found = [
        f"'{key}' is in the checkpoint, and config.json asks for no such weight"
        for key in sorted(present)
        if key.startswith(_MODEL) and key not in held and key not in stacked
    ]
    if found:
        more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        shown = "\n".join(f"- {one}" for one in found[:_SHOWN] + more)
        raise ValueError(f"{folder} does not fit the model's config.json:\n{shown}")


def _stacked(key: str) -> str:
    return re.sub(r"\.layers\.\d+\.", ".layers.", key)


def _is_tied(source: Source) -> bool:
    """Whether the checkpoint has no output layer of its own, or one that is the embedding."""
    infos = source.tensors()
    if _OUTPUT not in infos:
        return True
    embedding, output = infos[_EMBEDDING], infos[_OUTPUT]
    if embedding.shape != output.shape:
        return False
    rows, width = embedding.shape
    for start in range(0, rows, _ROWS):
        ranges = ((start, min(start + _ROWS, rows)), (0, width))
        if not equal(source.read(_EMBEDDING, ranges), source.read(_OUTPUT, ranges)):
            return False
    return True


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
