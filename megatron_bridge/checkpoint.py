"""Reads a HuggingFace checkpoint: a folder of safetensors files, part by part."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_hf_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint folder.

    Raises:
        ValueError: when it is absent or not a JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a HuggingFace model folder: it has no config.json")
    return _json_object(path)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}; fetch the checkpoint again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; fetch the checkpoint again")
    return content


class Checkpoint:
    """The tensors of a folder, read lazily; only the asked-for part of a tensor is read.

    Raises:
        ValueError: when files are absent, damaged or lie outside the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[str, Any] = {}
        self._file_of = self._locate()

    def _locate(self) -> dict[str, str]:
        """The file of each tensor."""
        if (self.folder / _INDEX).is_file():
            return self._read_index(self.folder / _INDEX)
        if (self.folder / _SINGLE).is_file():
            return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        raise ValueError(
            f"{self.folder} has neither {_SINGLE} nor {_INDEX}; the bridge reads HuggingFace "
            "checkpoints in safetensors format only"
        )

    def _read_index(self, path: Path) -> dict[str, str]:
        file_of = _json_object(path).get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(f, str) for f in file_of.values()):
            raise ValueError(f"{path} has no 'weight_map' from tensors to files")
        root = self.folder.resolve()
        for file in sorted(set(file_of.values())):
            # A name without folders cannot leave; a link inside the folder is the user's own.
            if Path(file).name != file or file in (".", ".."):
                raise ValueError(f"{path} names '{file}', which is not a file of {root}")
            if not (root / file).is_file():
                raise ValueError(f"{path} names '{file}', which is missing; fetch it again")
        self._check_index(path, file_of)
        return file_of

    def _check_index(self, path: Path, file_of: dict[str, str]) -> None:
        held = {file: set(self._open(file).keys()) for file in sorted(set(file_of.values()))}
        lost = [name for name, file in file_of.items() if name not in held[file]]
        if lost:
            raise ValueError(f"{path} places tensors in files that lack them: {_some(lost)}")

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.folder / file
            try:
                self._files[file] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path} is damaged or incomplete ({error}); fetch it again"
                ) from error
        return self._files[file]

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's whole shape, from the file's header."""
        return tuple(self._open(self._file_of[name]).get_slice(name).get_shape())

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """The part of a tensor that ``index`` cuts out."""
        return self._open(self._file_of[name]).get_slice(name)[index]


def _some(names: list[str], limit: int = 5) -> str:
    shown = ", ".join(sorted(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
