"""What a path holds."""

from enum import StrEnum
from pathlib import Path

from megatron_bridge.torch_dist import reader

ENGINE = "engine.json"
"""The description in the folder of one model of a run's checkpoint."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


class Kind(StrEnum):
    """The kinds of checkpoint that the bridge reads."""

    HUGGINGFACE = "huggingface"
    MEGATRON = "megatron"
    ENGINE = "engine"
    ADAPTER = "adapter"
    FILE = "file"


def kind_of(path: Path) -> Kind:
    """The kind of a path.

    Raises:
        ValueError: when it is none that the bridge reads.
    """
    if path.is_file():
        if path.suffix not in _WEIGHTS:
            raise ValueError(f"{path} is no weight file; known endings: {', '.join(_WEIGHTS)}")
        return Kind.FILE
    if not path.is_dir():
        raise ValueError(f"{path} does not exist")
    if reader.find(path) is not None:
        return Kind.MEGATRON
    if (path / ENGINE).is_file():
        return Kind.ENGINE
    if models := sorted(str(p.parent) for p in path.glob(f"*/{ENGINE}")):
        raise ValueError(
            f"{path} is a run's checkpoint: name one of its models, {', '.join(models)}"
        )
    if (path / "adapter_config.json").is_file():
        return Kind.ADAPTER
    if (path / "config.json").is_file():
        return Kind.HUGGINGFACE
    raise ValueError(
        f"{path} is no checkpoint: it has neither config.json (HuggingFace), "
        "latest_checkpointed_iteration.txt or metadata.json (Megatron), engine.json (a run's) nor "
        "adapter_config.json"
    )


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a model or an adapter, whole or damaged."""
    marks = ("config.json", "adapter_config.json", LATEST, "metadata.json")
    return any((folder / name).is_file() for name in marks)


def files_of(path: Path) -> list[Path]:
    """The files of a checkpoint whose change would change its tensors or what goes along."""
    found = reader.find(path) if path.is_dir() else None
    if path.is_file():
        return [path]
    if found is None:
        return _files(path)
    return _files(found) + _files(found.parent / COMPANIONS)


LATEST = "latest_checkpointed_iteration.txt"
"""The file of a Megatron-LM save folder that names its latest checkpoint."""

COMPANIONS = "huggingface"
"""The folder beside a Megatron checkpoint's own that holds config.json, tokenizer and the like."""


def adapter_weights(folder: Path) -> Path:
    """The file with an adapter's tensors."""
    pickled = folder / "adapter_model.bin"
    plain = folder / "adapter_model.safetensors"
    return pickled if pickled.exists() and not plain.exists() else plain


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*") if p.is_file()) if folder.is_dir() else []
