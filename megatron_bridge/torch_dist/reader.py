"""A ``torch_dist`` checkpoint as a Source: any rectangle of any tensor, whatever its chunks.

Chunks are never loaded. A chunk is a zip archive with the data stored as it is, so a rectangle is
a view of the mapped file, and what it costs is the pages that the caller copies from.
"""

import functools
import mmap
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.archive import refuse_compressed
from megatron_bridge.source import Ranges, TensorInfo
from megatron_bridge.torch_dist import metadata
from megatron_bridge.torch_dist.archives import DAMAGE, Data, Locator, reason
from megatron_bridge.torch_dist.metadata import Chunk, Place, Stored, some
from megatron_bridge.torch_dist.tiling import Tiling, check_inside, overlap, show, within

_LATEST = "latest_checkpointed_iteration.txt"
# Each mapped file holds a file descriptor, and a checkpoint of thousands of ranks has thousands.
_MOST_MAPS = 64
# A private map counts as memory to be reserved, unless told not to: a file may exceed the RAM.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def find(path: str | Path) -> Path | None:
    """The checkpoint's folder: ``path`` itself, or the latest that a training run saved in it.

    Args:
        path: a torch_dist checkpoint, or the folder that Megatron-LM was given as ``--save``.

    Returns:
        The folder with ``metadata.json``, or None when ``path`` is neither of the two.

    Raises:
        ValueError: when the latest checkpoint is not there or of another kind.
    """
    folder = Path(path)
    if metadata.is_torch_dist(folder):
        return folder
    latest = folder / _LATEST
    if not latest.is_file():
        return None
    text = latest.read_text(encoding="utf-8", errors="replace").strip()
    if text != "release" and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{latest} holds {text!r}, neither an iteration nor 'release'")
    found = folder / ("release" if text == "release" else f"iter_{int(text):07d}")
    if not found.is_dir():
        raise ValueError(f"{latest} names {found.name}, which is missing")
    if not metadata.is_torch_dist(found):
        raise ValueError(
            f"{found} is not a {metadata.BACKEND} checkpoint; convert it with Megatron-LM's "
            f"--ckpt-convert-format {metadata.BACKEND}"
        )
    return found


class TorchDist:
    """The tensors of a checkpoint folder; a Source.

    The vocabulary is padded as its writer padded it: ``embedding.word_embeddings.weight`` and
    ``output_layer.weight`` have ``ceil(vocab / (divisor * tp)) * divisor * tp`` rows. Megatron
    marks both with ``allow_shape_mismatch``: a model with more rows than the file gets zeros in
    those that the file lacks, one with fewer rows drops the last of the file, silently in both
    cases. Whoever reads them here asks for the rows of the real vocabulary.

    Files must not shrink while they are read.

    Raises:
        ValueError: when the folder is no such checkpoint, or damaged, incomplete or refused.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._index = metadata.read_index(self.folder)
        self._tensors = {name: stored.info for name, stored in self._index.tensors.items()}
        self._map = functools.lru_cache(_MOST_MAPS)(self._open)
        self._tilings: dict[str, Tiling] = {}
        self._data: dict[Place, Data] = {}
        self._locator = Locator()

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, the optimizer's among them."""
        return self._tensors

    def objects(self) -> tuple[str, ...]:
        """Names of what is stored as pickles (``_extra_state``, ``rng_state``); never read."""
        return tuple(self._index.objects)

    def chunks(self, name: str) -> tuple[Ranges, ...]:
        """The rectangles that a tensor is stored in; reading one of them copies nothing."""
        return tuple(chunk.ranges for chunk in self._stored(name).chunks)

    def check(self, names: Iterable[str] | None = None) -> None:
        """Prove that the chunks of these tensors (default: all) cover each element once.

        Raises:
            ValueError: naming the tensors whose chunks leave holes or overlap.
        """
        faults = []
        for name in self._tensors if names is None else names:
            try:
                self._tiling(name)
            except ValueError as error:
                faults.append(str(error))
        if faults:
            raise ValueError(some(faults))

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """One rectangle of a tensor.

        Returns:
            A view of the mapped file when one chunk holds the rectangle, else a new tensor.

        Raises:
            ValueError: when the rectangle is not inside the tensor, the tensor's chunks do not
                cover it exactly once, or a chunk is damaged or contradicts the metadata.
        """
        info = self._stored(name).info
        check_inside(ranges, info.shape, f"of '{name}'")
        chunks = [self._stored(name).chunks[i] for i in self._tiling(name).overlapping(ranges)]
        if len(chunks) == 1:
            return self._view(name, chunks[0])[within(ranges, chunks[0].ranges)]
        whole = torch.empty([stop - start for start, stop in ranges], dtype=info.dtype)
        for chunk in chunks:
            shared = overlap(ranges, chunk.ranges)
            part = self._view(name, chunk)[within(shared, chunk.ranges)]
            whole[within(shared, ranges)].copy_(part)
        return whole

    def common(self) -> dict[str, Any]:
        """What the checkpoint stores uncut: ``iteration``, ``checkpoint_version`` and the like.

        Raises:
            ValueError: when ``common.pt`` is missing, damaged, or names classes that could run
                code (Megatron-LM stores its arguments as one).
        """
        path = self.folder / metadata.COMMON
        if not path.is_file():
            raise ValueError(f"{path} is missing: the checkpoint is incomplete; copy it again")
        refuse_compressed(path)
        try:
            common = torch.load(path, map_location="cpu", weights_only=True)
        except DAMAGE as error:
            raise ValueError(f"{path} is refused or damaged: {reason(error)}") from error
        if not isinstance(common, dict):
            raise ValueError(f"{path} holds no dictionary")
        return common

    def _stored(self, name: str) -> Stored:
        if name not in self._index.tensors:
            raise ValueError(f"{self.folder} has no tensor '{name}'")
        return self._index.tensors[name]

    def _tiling(self, name: str) -> Tiling:
        if name not in self._tilings:
            stored = self._stored(name)
            try:
                ranges = [chunk.ranges for chunk in stored.chunks]
                self._tilings[name] = Tiling(stored.info.shape, ranges)
            except ValueError as error:
                raise ValueError(f"{self.folder}: tensor '{name}': {error}") from error
        return self._tilings[name]

    def _view(self, name: str, chunk: Chunk) -> Tensor:
        """A chunk as a view of its file."""
        file = self._map(chunk.place.file)
        if chunk.place not in self._data:
            self._data[chunk.place] = self._locate(name, chunk)
        return self._data[chunk.place].view(file)

    def _open(self, file: str) -> mmap.mmap:
        path = self.folder / file
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty; copy the checkpoint again")
        with open(path, "rb") as opened:
            return mmap.mmap(
                opened.fileno(),
                0,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                # Torch knows no read-only tensors and warns of them.
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )

    def _locate(self, name: str, chunk: Chunk) -> Data:
        place = chunk.place
        what = (
            f"{self.folder / place.file}, bytes {place.start} to {place.start + place.length}, "
            f"the chunk {show(chunk.ranges)} of '{name}'"
        )
        try:
            found = self._locator.locate(self._map(place.file), place.start, place.length)
        except ValueError as error:
            raise ValueError(f"{what}: {error}; copy the checkpoint again") from error
        dtype, sizes = self._tensors[name].dtype, _sizes(chunk.ranges)
        if (found.dtype, found.shape) != (dtype, sizes):
            raise ValueError(
                f"{what}: it is {found.dtype} {list(found.shape)}, and by the metadata "
                f"{dtype} {list(sizes)}"
            )
        return found


def _sizes(ranges: Ranges) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in ranges)
