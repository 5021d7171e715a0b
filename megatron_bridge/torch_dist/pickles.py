"""Reads ``.metadata`` without running it.

A pickle is a program that may call any function it can name. Here it can name only what such a
file needs, and even those names stand for inert records: nothing of torch is constructed, and
nothing that a file does outlives its reading.
"""

import pickle
from pathlib import Path
from typing import Any

import torch

_DCP = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_ALLOWED = {
    f"{_DCP}.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    # What Megatron keeps beside the metadata when it reuses the plan of its last save.
    f"{_DCP}.planner": {
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "BytesIOWriteData",
    },
    _MEGATRON: {"MCoreMetadata", "MCoreSavePlan"},
    # Where older versions of torch had the properties.
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    # The folder that the checkpoint was first written to.
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}
_PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
}
# What a damaged pickle may make the unpickler raise.
_DAMAGE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class Record:
    """Stands for an object of the file: what it was built from, and nothing it could do."""

    kind = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def fields(self) -> dict[Any, Any]:
        """The attributes that the object had."""
        return self.state if isinstance(self.state, dict) else {}


class _Refused(ValueError):
    """The file names something that is not allowed."""


class _Unpickler(pickle.Unpickler):
    """Knows the names of ``_ALLOWED`` alone; its records' classes are new for each file."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path
        self._kinds: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return value
        if name in _ALLOWED.get(module, ()):
            return self._kinds.setdefault(name, type(name, (Record,), {"kind": name}))
        raise _Refused(
            f"{self._path} is refused: it is a pickle that names {module}.{name}, which a "
            "checkpoint's metadata does not need and which could run code; get the checkpoint "
            "from a source that you trust"
        )


def load(path: Path) -> Record:
    """The ``Metadata`` object of a file, as records.

    Raises:
        ValueError: when the file is absent, damaged, or names a class that is not allowed.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing: the checkpoint is incomplete; copy it again")
    try:
        with open(path, "rb") as file:
            loaded = _Unpickler(file, path).load()
    except _Refused:
        raise
    except _DAMAGE as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}); copy it again"
        ) from error
    if not isinstance(loaded, Record) or loaded.kind not in ("Metadata", "MCoreMetadata"):
        raise ValueError(f"{path} does not describe a checkpoint")
    return loaded
