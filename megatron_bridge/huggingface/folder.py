"""A HuggingFace folder as a source of tensors: safetensors or pickle files, mapped."""

import copy
import errno
import json
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_bridge.huggingface.pickle_file import PickleFile
from megatron_bridge.huggingface.safetensors_file import SafetensorsFile, listed
from megatron_bridge.huggingface.stamps import Stamps
from megatron_bridge.source import Ranges, TensorInfo

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
# The formats in order of preference: the file of a whole model, the index of a cut one.
_FORMATS = (
    ("model.safetensors", INDEX),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_PICKLES = (".bin", ".pt", ".pth")
_WEIGHTS = (".safetensors", *_PICKLES, ".gguf", ".h5", ".msgpack", ".ckpt")
WeightFile = SafetensorsFile | PickleFile


class HuggingFaceFolder:
    """config.json and tensors of a folder, or of one weight file with config.json beside it.

    Opening reads and checks the headers of all files; the tensors are views of mapped files.

    Attributes:
        path: the folder.
        files: paths of the weight files, in the order of the tensors.

    Raises:
        ValueError: when files are absent, damaged, unreadable, contradict the index or lie outside
            the folder; all such faults at once.
    """

    def __init__(self, path: str | Path) -> None:
        given = Path(path)
        self.path = given.parent if _exists(given) and not given.is_dir() else given
        self._config = load_hf_config(self.path)
        index, indexed = None, {}
        if self.path == given:
            names, index, indexed = _weights(self.path)
        else:
            names = [given.name]
        self.files = tuple(self.path / name for name in names)
        noted = (self.path / CONFIG, *((self.path / index,) if index else ()), *self.files)
        self._stamps = Stamps(noted)
        opened = _open_all(self.files)
        self._file_of = _placed(opened)
        if index:
            _check_index(self.path / index, indexed, self._file_of)
        self._infos = {name: file.infos[name] for name, file in self._file_of.items()}

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return copy.deepcopy(self._config)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, file by file, in the order of the data."""
        return self._infos

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """The rectangle ``ranges`` of one tensor: a view of a mapped file, never to be written."""
        return self._file_of[name].read(name, ranges)

    def check_unchanged(self) -> None:
        """Make sure that no file has changed since the folder was opened.

        Raises:
            ValueError: naming the files that changed.
        """
        self._stamps.check()


def load_hf_config(folder: str | Path) -> dict[str, Any]:
    """The content of a model folder's config.json.

    Raises:
        ValueError: when it is absent or not a JSON object.
    """
    return read_json(_required(Path(folder), CONFIG))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: when it cannot be read or is no JSON object.
    """
    try:
        _check_regular(path)
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(_unreadable(path, error)) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; fetch it again")
    return content


def open_weights(path: Path) -> WeightFile:
    """One weight file, by its ending.

    Raises:
        ValueError: when it is damaged or cannot be read.
    """
    try:
        _check_regular(path)
        return PickleFile(path) if path.suffix in _PICKLES else SafetensorsFile(path)
    except OSError as error:
        raise ValueError(_unreadable(path, error)) from error


def _check_regular(path: Path) -> None:
    """Opening a pipe would wait for ever, and a device never ends."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")


def _unreadable(path: Path, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"no permission to read {path}"
    return f"{path} cannot be read: {error.strerror or error}"


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ValueError(_unreadable(path, error)) from error
    return True


def _required(folder: Path, name: str) -> Path:
    if not _exists(folder):
        raise ValueError(f"there is no folder {folder}")
    if not _exists(folder / name):
        raise ValueError(f"{folder} is not a HuggingFace model folder: it has no {name}")
    return folder / name


def _weights(folder: Path) -> tuple[list[str], str | None, dict[str, str]]:
    """Names of the weight files; where there is an index, its name and each tensor's file."""
    for whole, index in _FORMATS:
        has_whole, has_index = _exists(folder / whole), _exists(folder / index)
        if has_index:
            indexed = _weight_map(folder / index)
            names = _indexed(folder, index, indexed)
            if has_whole and whole not in names:
                raise ValueError(
                    f"{folder} holds two models, {whole} and the files of {index}; remove one"
                )
            return names, index, indexed
        if has_whole:
            return [whole], None, {}
    others = sorted(path.name for path in folder.iterdir() if path.suffix in _WEIGHTS)
    raise ValueError(
        f"{folder} has no weights: none of {', '.join(n for pair in _FORMATS for n in pair)}"
        + (f"; it has {listed(others, ', ')}" if others else "")
    )


def _weight_map(path: Path) -> dict[str, str]:
    content = read_json(path).get("weight_map")
    if not isinstance(content, dict) or not all(isinstance(f, str) for f in content.values()):
        raise ValueError(f"{path} has no 'weight_map' from tensors to files; fetch it again")
    return content


def _indexed(folder: Path, index: str, indexed: Mapping[str, str]) -> list[str]:
    names = sorted(set(indexed.values()))
    faults = []
    for name in names:
        # A name without folders cannot leave; a link inside the folder is the user's own.
        if Path(name).name != name or name in ("", ".", "..") or "\0" in name:
            faults.append(f"'{name}' is not a file of {folder}")
        elif not _exists(folder / name):
            faults.append(f"'{name}' is missing")
    if not names:
        faults.append("no file at all")
    if faults:
        raise ValueError(f"{folder / index} names files that are not there: {listed(faults)}")
    return names


def _open_all(paths: Iterable[Path]) -> list[WeightFile]:
    opened, faults = [], []
    for path in paths:
        try:
            opened.append(open_weights(path))
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError(listed(faults, "\n"))
    return opened


def _placed(files: list[WeightFile]) -> dict[str, WeightFile]:
    """The file of each tensor."""
    placed: dict[str, WeightFile] = {}
    faults = []
    for file in files:
        for name in file.infos.keys() & placed.keys():
            faults.append(f"'{name}' in {placed[name].path.name} and {file.path.name}")
        placed.update(dict.fromkeys(file.infos, file))
    if faults:
        folder = files[0].path.parent
        raise ValueError(f"{folder} holds tensors twice: {listed(sorted(faults))}; remove one")
    return placed


def _check_index(path: Path, indexed: Mapping[str, str], file_of: Mapping[str, WeightFile]) -> None:
    """The index and the files must tell the same of every tensor."""
    names = {file: file.path.name for file in file_of.values()}
    faults = [
        f"it places '{name}' in {file}, which lacks it"
        for name, file in indexed.items()
        if name not in file_of or names[file_of[name]] != file
    ]
    faults += [
        f"{file_of[name].path.name} holds '{name}', which the index does not name"
        for name in file_of
        if name not in indexed
    ]
    if faults:
        raise ValueError(f"{path} contradicts its files: {listed(faults)}; fetch them again")
