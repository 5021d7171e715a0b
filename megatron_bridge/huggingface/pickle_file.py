"""One ``.bin`` or ``.pt`` file: tensors alone are unpickled, and mapped rather than loaded."""

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.archive import refuse_compressed
from megatron_bridge.huggingface.safetensors_file import DTYPE_NAMES, inside, listed
from megatron_bridge.source import Ranges, TensorInfo


class PickleFile:
    """The tensors of one file that ``torch.save`` wrote.

    Nothing but tensors and plain containers is unpickled (torch's ``weights_only``). The data is
    mapped: it costs no memory of our own.

    Attributes:
        infos: dtype and shape of each tensor, in the file's order.

    Raises:
        ValueError: when the file is damaged, holds code or anything but named tensors.
        OSError: when it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors = _load(path)
        self.infos = {
            name: TensorInfo(tensor.dtype, tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """The rectangle ``ranges`` of one tensor: a view of the file, read-only by contract."""
        assert inside(self.infos[name].shape, ranges), (name, self.infos[name].shape, ranges)
        return self._tensors[name][tuple(slice(*interval) for interval in ranges)]


def _load(path: Path) -> dict[str, Tensor]:
    with open(path, "rb"):  # an OSError of its own; what torch says of it varies
        pass
    refuse_compressed(path)
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is refused: it holds {_culprit(error)}, and unpickling that could run code; "
            "convert it to safetensors where you trust it"
        ) from error
    except RuntimeError as error:
        raise ValueError(_why_unreadable(path, error)) from error
    except (EOFError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is damaged ({_first_line(error)}); fetch it again") from error
    return _named_tensors(path, content)


def _named_tensors(path: Path, content: Any) -> dict[str, Tensor]:
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not tensors by name")
    size = path.stat().st_size
    faults = [
        f"{name!r} {fault}"
        for name, value in content.items()
        if (fault := _fault(name, value, size))
    ]
    if faults:
        raise ValueError(f"{path} must hold tensors by name and nothing else: {listed(faults)}")
    return {name: tensor.detach() for name, tensor in content.items()}


def _fault(name: Any, value: Any, file_bytes: int) -> str | None:
    if not isinstance(name, str):
        return f"is a {type(name).__name__}, not a name"
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, not a tensor"
    if value.layout is not torch.strided or value.device.type != "cpu":
        return f"is a {value.layout} tensor on {value.device}"
    if value.dtype not in DTYPE_NAMES:
        return f"has dtype {value.dtype}, which is not one of {', '.join(DTYPE_NAMES.values())}"
    if value.numel() * value.dtype.itemsize > file_bytes:
        return f"repeats its data to shape {tuple(value.shape)}, more than the file holds"
    return None


def _culprit(error: pickle.UnpicklingError) -> str:
    """What was refused. torch's own text advises to turn the check off; it is not passed on."""
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    return f"'{named[1]}'" if named else "something other than tensors"


def _why_unreadable(path: Path, error: RuntimeError) -> str:
    if "mmap can only be used" in str(error):
        return (
            f"{path} is in torch's format from before 1.6 or damaged, and cannot be mapped; load "
            "it where you trust it and save it again, best as safetensors"
        )
    return f"{path} is damaged or truncated ({_first_line(error)}); fetch it again"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
