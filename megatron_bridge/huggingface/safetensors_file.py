"""One safetensors file: a checked header, then views of the mapped file."""

import json
import math
import mmap
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.source import Ranges, TensorInfo

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"

# The format's own limits: of the header, and (of torch's tensors) of the number of dimensions.
_MOST_HEADER_BYTES = 100_000_000
_MOST_DIMENSIONS = 64
_LENGTH_BYTES = 8
_SHOWN_FAULTS = 5


class SafetensorsFile:
    """The tensors of one file. Opening reads the header; the data is mapped when first read.

    Attributes:
        infos: dtype and shape of each tensor, in the order of the data.

    Raises:
        ValueError: when the file is damaged; the text names all faults of its header.
        OSError: when it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header, self._data_at, data_bytes = _read_header(path)
        self.infos, self._begin = _entries(path, header, data_bytes)
        self._mapped: Tensor | None = None
        self._mapped_as: dict[torch.dtype, Tensor] = {}
        self._mapping = threading.Lock()

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """The rectangle ``ranges`` of one tensor: a view of the file, read-only by contract."""
        info = self.infos[name]
        begin = self.offset(name)
        assert inside(info.shape, ranges), f"{ranges} is not inside '{name}' of {info.shape}"
        if begin % info.dtype.itemsize:
            return self._read_unaligned(info, begin, ranges)
        # One step of torch instead of several: models have tens of thousands of tensors.
        at, step = begin // info.dtype.itemsize, 1
        sizes, strides = [], []
        for (first, last), size in zip(reversed(ranges), reversed(info.shape), strict=True):
            at += first * step
            sizes.append(last - first)
            strides.append(step)
            step *= size
        return self._elements(info.dtype).as_strided(sizes[::-1], strides[::-1], at)

    def offset(self, name: str) -> int:
        """Where a tensor's data starts in the file, in bytes."""
        return self._data_at + self._begin[name]

    def _read_unaligned(self, info: TensorInfo, begin: int, ranges: Ranges) -> Tensor:
        """A copy: no tensor of this dtype can start at such an address. Rare, other writers pad."""
        first, last = ranges[0] if ranges else (0, 1)
        row_bytes = info.bytes // max(info.shape[0], 1) if ranges else info.bytes
        rows = self._map()[begin + first * row_bytes : begin + last * row_bytes].clone()
        shape = (last - first, *info.shape[1:]) if ranges else ()
        inner = tuple(slice(*interval) for interval in ranges[1:])
        rows = rows.view(info.dtype).view(shape)
        return rows[(slice(None), *inner)] if ranges else rows

    def _elements(self, dtype: torch.dtype) -> Tensor:
        """The whole file as numbers of this kind."""
        if dtype not in self._mapped_as:
            mapped = self._map()
            whole = len(mapped) - len(mapped) % dtype.itemsize
            self._mapped_as[dtype] = mapped[:whole].view(dtype)
        return self._mapped_as[dtype]

    def _map(self) -> Tensor:
        """The whole file as bytes. Pages come from the page cache: no memory of our own."""
        with self._mapping:
            if self._mapped is None:
                with open(self.path, "rb") as file, warnings.catch_warnings():
                    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                    # Not writable, on purpose: a write by mistake must not pass unnoticed.
                    warnings.filterwarnings("ignore", "The given buffer is not writable")
                    self._mapped = torch.frombuffer(mapped, dtype=torch.uint8)
            return self._mapped


def inside(shape: tuple[int, ...], ranges: Ranges) -> bool:
    """Whether ``ranges`` is a rectangle of a tensor of this shape."""
    return len(ranges) == len(shape) and all(
        0 <= first <= last <= size for (first, last), size in zip(ranges, shape, strict=True)
    )


class _Twice(ValueError):
    """A JSON object has a key twice; Python would keep the last and say nothing."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        raise _Twice(next(_short(k) for k, _ in pairs if k in seen or seen.add(k)))
    return found


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the data starts and the data's size, both in bytes."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            what = f"header of {length} bytes" if size >= _LENGTH_BYTES else "header"
            raise ValueError(
                f"{path} is truncated or no safetensors file: its {size} bytes cannot hold its "
                f"{what}; fetch it again"
            )
        if length > _MOST_HEADER_BYTES:
            raise ValueError(
                f"{path} has a header of {length} bytes; the format allows {_MOST_HEADER_BYTES}"
            )
        text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_once)
    except _Twice as error:
        raise ValueError(f"the header of {path} names {error} twice; fetch it again") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the header of {path} is not JSON: {error}; fetch it again") from error
    if not isinstance(header, dict):
        raise ValueError(f"the header of {path} is no JSON object; fetch it again")
    header.pop(METADATA, None)
    return header, _LENGTH_BYTES + length, size - _LENGTH_BYTES - length


def _entries(
    path: Path, header: dict[str, Any], data_bytes: int
) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """Each tensor's description and first byte, in the order of the data.

    Thousands of tensors share few shapes, so their descriptions are shared too.
    """
    known: dict[tuple[str, tuple[int, ...]], tuple[TensorInfo, int]] = {}
    spans: list[tuple[int, int, str]] = []
    infos: dict[str, TensorInfo] = {}
    faults: list[str] = []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = (
                entry["dtype"],
                tuple(entry["shape"]),
                entry["data_offsets"],
            )
            if (dtype, shape) not in known:
                described = _description(dtype, shape)
                known[dtype, shape] = described, described.bytes
            info, size = known[dtype, shape]
            if type(begin) is not int or type(end) is not int or end - begin != size:
                raise ValueError(
                    f"data_offsets {_short([begin, end])} are not the {size} bytes of "
                    f"{dtype} {list(shape)}"
                )
        except ValueError as error:
            faults.append(f"'{name}': {error}")
        except (TypeError, KeyError):
            faults.append(f"'{name}' is not described by dtype, shape and data_offsets")
        else:
            infos[name] = info
            spans.append((begin, end, name))
    spans.sort()
    if not faults:
        faults = _layout_faults(spans, data_bytes)
    if faults:
        raise ValueError(f"{path} is damaged: {listed(faults)}; fetch it again")
    return {name: infos[name] for _, _, name in spans}, {name: at for at, _, name in spans}


def _description(dtype: Any, shape: tuple[Any, ...]) -> TensorInfo:
    if dtype not in DTYPES:
        raise ValueError(f"dtype {_short(dtype)} is not one of {', '.join(DTYPES)}")
    sizes = all(type(size) is int and size >= 0 for size in shape)
    if not sizes or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"shape {_short(list(shape))} is not a list of sizes")
    info = TensorInfo(DTYPES[dtype], shape)
    if math.prod(size or 1 for size in shape) >= 2**63:
        raise ValueError(f"shape {_short(list(shape))} is larger than any tensor")
    return info


def _layout_faults(spans: list[tuple[int, int, str]], data_bytes: int) -> list[str]:
    """Tensors must lie behind one another and fill the file."""
    faults = []
    at = 0
    before = "the header"
    for begin, end, name in spans:
        if begin != at:
            what = "overlaps" if begin < at else f"leaves {begin - at} unnamed bytes behind"
            faults.append(f"'{name}' at byte {begin} of the data {what} {before}")
        at, before = max(at, end), f"'{name}'"
    if not faults and at > data_bytes:
        faults.append(f"it is truncated, its tensors need {at} bytes and it has {data_bytes}")
    if not faults and at < data_bytes:
        faults.append(f"{data_bytes - at} bytes at its end belong to no tensor")
    return faults


def listed(faults: list[str], separator: str = "; ", limit: int = _SHOWN_FAULTS) -> str:
    """The first faults, and how many there are besides."""
    more = len(faults) - limit
    return separator.join(faults[:limit]) + (f"{separator}and {more} more" if more > 0 else "")


def _short(value: Any) -> str:
    """A hostile value in an error's text: never pages of it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
