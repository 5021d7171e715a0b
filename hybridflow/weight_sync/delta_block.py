"""What changed between two blocks of numbers, compressed without loss.

Numbers are taken as integers of their own width, so any dtype and any bit pattern (NaN, -0)
survives. An optimizer step moves a weight to a near integer: differences are small, and small
differences compress better than XOR does. In bfloat16 most weights do not move at all, so the
places of the moved ones are stored as gaps. zlib at its fastest level: on steps of a 135M model
Zstandard saves another 5% of the bytes, which is not worth a dependency.
"""

from __future__ import annotations

import zlib

import numpy as np

BLOCK_BYTES = 4 << 20
"""Of the uncompressed tensor. Coding a block takes at most ten times as much memory."""

SAME, SPARSE, DENSE = "same", "sparse", "dense"
KINDS = (SAME, SPARSE, DENSE)
_DENSE_SHARE = 0.25  # of changed numbers, from which on gaps cost more than zeros
_ESCAPE = 255  # a gap of at least this many numbers is stored apart, in 4 bytes
_COUNTS = 8  # bytes: how many numbers changed, how many gaps are stored apart
_LEVEL = 1
_SAMPLE_BYTES = 1 << 14


class DamagedBlock(ValueError):
    """A block that no encoder wrote."""


def encode(old: np.ndarray, new: np.ndarray) -> tuple[str, bytes]:
    """Kind and payload of the change from ``old`` to ``new``: integers [N] of one dtype."""
    changed = np.flatnonzero(old != new)
    if not len(changed):
        return SAME, b""
    if len(changed) >= _DENSE_SHARE * len(old):
        return DENSE, _pack_planes(_planes(_zigzag(new - old)), len(old))
    gaps = np.diff(changed, prepend=-1) - 1
    apart = gaps[gaps >= _ESCAPE].astype("<u4")
    counts = np.array([len(changed), len(apart)], "<u4")
    short = np.minimum(gaps, _ESCAPE).astype(np.uint8)
    values = _planes(_zigzag(new[changed] - old[changed]))
    parts = (counts.tobytes(), short.tobytes(), apart.tobytes(), values)
    return SPARSE, zlib.compress(b"".join(parts), _LEVEL)


def decode(block: np.ndarray, kind: str, payload: bytes) -> None:
    """Turn ``block`` from the old numbers to the new ones, in place.

    Raises:
        DamagedBlock: the payload does not describe a change of a block of this size.
    """
    if kind == SAME:
        return
    if kind == DENSE:
        planes = _unpack_planes(payload, len(block), block.itemsize)
        block += _unzigzag(_numbers(planes, len(block), block.dtype))
        return
    most = int(_DENSE_SHARE * len(block)) + 1
    raw = _inflate(payload, _COUNTS + most * (5 + block.itemsize))
    changed, values = _sparse(raw, len(block), block.dtype)
    block[changed] += _unzigzag(values)


def _sparse(raw: bytes, size: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Places of the changed numbers, and by how much they changed (zigzag)."""
    if len(raw) < _COUNTS:
        raise DamagedBlock(f"{len(raw)} bytes hold no counts")
    count, apart = (int(n) for n in np.frombuffer(raw, "<u4", 2))
    expected = _COUNTS + count * (1 + dtype.itemsize) + 4 * apart
    if len(raw) != expected:
        raise DamagedBlock(f"{len(raw)} bytes where its counts make {expected}")
    gaps = np.frombuffer(raw, np.uint8, count, _COUNTS).astype(np.int64)
    escaped = gaps == _ESCAPE
    if int(escaped.sum()) != apart:
        raise DamagedBlock(f"{int(escaped.sum())} long gaps where its counts make {apart}")
    gaps[escaped] = np.frombuffer(raw, "<u4", apart, _COUNTS + count)
    changed = np.cumsum(gaps + 1) - 1
    if count and changed[-1] >= size:
        raise DamagedBlock(f"it changes number {changed[-1]} of {size}")
    return changed, _numbers(raw[_COUNTS + count + 4 * apart :], count, dtype)


def _pack_planes(planes: bytes, size: int) -> bytes:
    """Each plane by itself: the lowest bytes of float32 are noise, and trying takes long."""
    parts = [_pack(planes[begin : begin + size]) for begin in range(0, len(planes), size)]
    return np.array([len(part) for part in parts], "<u4").tobytes() + b"".join(parts)


def _pack(plane: bytes) -> bytes:
    """Compressed, or as it is where that saves nothing worth the time."""
    middle = len(plane) // 2
    sample = plane[middle : middle + _SAMPLE_BYTES]
    if len(plane) > _SAMPLE_BYTES and len(zlib.compress(sample, _LEVEL)) > 0.95 * len(sample):
        return plane
    packed = zlib.compress(plane, _LEVEL)
    return packed if len(packed) < len(plane) else plane


def _unpack_planes(payload: bytes, size: int, width: int) -> bytes:
    """The inverse of ``_pack_planes``."""
    begin, planes = 4 * width, []
    if len(payload) < begin:
        raise DamagedBlock(f"{len(payload)} bytes hold no sizes")
    for length in np.frombuffer(payload, "<u4", width).tolist():
        part = payload[begin : begin + length]
        planes.append(part if length == size else _inflate(part, size))
        begin += length
    if begin != len(payload):
        raise DamagedBlock(f"{len(payload)} bytes where its sizes make {begin}")
    return b"".join(planes)


def _inflate(payload: bytes, most: int) -> bytes:
    """At most ``most`` bytes: a crafted payload cannot fill the memory."""
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(payload, most + 1)
    except zlib.error as error:
        raise DamagedBlock(str(error)) from error
    if len(raw) > most or not inflater.eof or inflater.unused_data:
        raise DamagedBlock(f"its {len(payload)} bytes are cut off or too many")
    return raw


def _zigzag(difference: np.ndarray) -> np.ndarray:
    """Small differences of either sign as small unsigned numbers: 0, -1, 1, -2 ... -> 0, 1, 2."""
    return (difference << 1) ^ (difference >> (8 * difference.itemsize - 1))


def _unzigzag(coded: np.ndarray) -> np.ndarray:
    bits = coded.view(f"u{coded.itemsize}")
    return (bits >> 1).view(coded.dtype) ^ -(coded & 1)


def _planes(numbers: np.ndarray) -> bytes:
    """All first bytes, then all second bytes ...: bytes of equal rank resemble each other."""
    return numbers.view(np.uint8).reshape(-1, numbers.itemsize).T.tobytes()


def _numbers(planes: bytes, count: int, dtype: np.dtype) -> np.ndarray:
    """The inverse of ``_planes``."""
    if len(planes) != count * dtype.itemsize:
        raise DamagedBlock(f"{len(planes)} bytes hold no {count} numbers")
    split = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, count)
    return np.ascontiguousarray(split.T).reshape(-1).view(dtype)
