"""Writing versions as deltas: only what changed since the version before."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from hybridflow.weight_sync.delta_block import BLOCK_BYTES, SAME, encode
from hybridflow.weight_sync.delta_file import (
    append,
    needing_space,
    read_at,
    write_at,
    write_durably,
)
from hybridflow.weight_sync.delta_manifest import (
    DATA,
    MANIFEST,
    WEIGHTS,
    Manifest,
    TensorDelta,
)
from hybridflow.weight_sync.version import check_space, check_weight, read_config, write_version
from megatron_bridge.huggingface.safetensors_file import DTYPE_NAMES, SafetensorsFile


class VersionWriter:
    """Writes a run's versions: a full one, then at most ``full_every - 1`` deltas, and so on.

    Each delta needs the version before it. The writer keeps its own copy of the last version in
    ``state_directory`` (of this machine; a shared-memory folder is quickest), which is one model
    of space; beyond it a delta takes one tensor and ten blocks of memory. After a failed write
    the next version is a full one.
    """

    def __init__(
        self,
        directory: str | Path,
        source_model_folder: str | Path,
        state_directory: str | Path,
        full_every: int = 10,
    ) -> None:
        if full_every < 1:
            raise ValueError(f"full_every is {full_every}; it must be 1 (no deltas) or more.")
        self._directory, self._source = Path(directory), Path(source_model_folder)
        self._state_folder = Path(state_directory)
        self._tied = bool(read_config(self._source).get("tie_word_embeddings"))
        self._full_every = full_every
        self._state: _State | None = None
        self._since_full = 0

    def write(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int, *, full: bool = False
    ) -> Path:
        """Write ``directory``/v``version``, full or delta, whole or absent; returns its path.

        Args:
            weights: as for ``write_version``.
            full: a reader could not use what was written (``NeedsFull``): a full version now,
                which takes the place of the same version.

        Raises:
            ValueError: for faulty weights, a version that is not newer than the last one, or too
                little space.
        """
        state, self._state = self._state, None
        if full or state is None or self._full_is_due():
            if state is not None:
                state.close()
            return self._write_full(weights, version, replace=full)
        try:
            target = self._write_delta(state, weights, version)
        except BaseException:
            state.close()  # half of it may be new already
            raise
        self._state, self._since_full = state, self._since_full + 1
        return target

    def writes_full(self) -> bool:
        """Whether the next version is a full one, were it not asked for."""
        return self._state is None or self._full_is_due()

    def _full_is_due(self) -> bool:
        return self._since_full + 1 >= self._full_every

    def _write_full(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int, replace: bool
    ) -> Path:
        target = write_version(self._directory, weights, self._source, version, replace=replace)
        self._since_full = 0
        if self._full_every > 1:
            try:
                self._state = _State(target / WEIGHTS, self._state_folder, version)
            except BaseException:
                shutil.rmtree(target)
                raise
        return target

    def close(self) -> None:
        """Give the copy's space back; the next version is a full one."""
        if self._state is not None:
            self._state.close()
            self._state = None

    def _write_delta(
        self, state: _State, weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> Path:
        target = self._directory / f"v{version}"
        if target.exists() or version <= state.version:
            raise ValueError(
                f"{target} exists already or is not newer than version {state.version}; a version "
                "is written once, in order."
            )
        aside = self._directory / f".v{version}.{uuid.uuid4().hex[:8]}"
        aside.mkdir(mode=0o700)
        try:
            with needing_space(self._directory, f"the delta of version {version}"):
                with (aside / DATA).open("wb", buffering=0) as data:
                    tensors = self._changes(state, weights, data)
                    os.fsync(data.fileno())
                write_durably(aside / MANIFEST, Manifest(version, state.version, tensors).text())
                aside.rename(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        state.version = version
        return target

    def _changes(
        self, state: _State, weights: Iterable[tuple[str, torch.Tensor]], data: BinaryIO
    ) -> Mapping[str, TensorDelta]:
        missing = set(state.shapes)
        tensors = {}
        for name, tensor in weights:
            if name == "lm_head.weight" and self._tied:
                continue
            check_weight(name, tensor, state.shapes, missing, state.dtype)
            tensors[name] = state.advance(name, tensor, data)
            missing.remove(name)
        if missing:
            raise ValueError(
                f"version not written: {len(missing)} weights are missing, among them "
                f"{sorted(missing)[:3]}."
            )
        return tensors


class _State:
    """The writer's own copy of the last version, which the next delta starts from.

    A file without a name: it goes with the process, however that ends.
    """

    def __init__(self, weights: Path, folder: Path, version: int) -> None:
        """Copy a version's file into ``folder``."""
        check_space(folder, weights.stat().st_size)
        self.version = version
        self._layout = SafetensorsFile(weights)
        infos = self._layout.infos
        self.shapes = {name: info.shape for name, info in infos.items()}
        self.dtype = next(iter(infos.values())).dtype
        self._old = np.empty(BLOCK_BYTES, np.uint8)
        with ExitStack() as stack:
            stack.enter_context(needing_space(folder, f"the writer's copy of {weights}"))
            self._file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
            with weights.open("rb") as source:
                shutil.copyfileobj(source, self._file, BLOCK_BYTES)
            self._digests = {name: self._digest(name) for name in infos}
            stack.pop_all()

    def close(self) -> None:
        """Give the space back."""
        self._file.close()

    def advance(self, name: str, tensor: torch.Tensor, data: BinaryIO) -> TensorDelta:
        """Append the change of one tensor to ``data``, and keep the new bytes."""
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        begin, at = data.tell(), self._layout.offset(name)
        result = hashlib.sha256(flat.data).hexdigest()
        base, self._digests[name] = self._digests[name], result
        blocks = []
        if result != base:
            for start in range(0, len(flat), BLOCK_BYTES):
                new = flat[start : start + BLOCK_BYTES]
                blocks.append(self._block(new, at + start, tensor.element_size(), data))
        return TensorDelta(
            DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), base, result, begin, tuple(blocks)
        )

    def _block(self, new: np.ndarray, at: int, width: int, data: BinaryIO) -> tuple[str, int]:
        old = self._old[: len(new)]
        read_at(self._file, at, old)
        kind, payload = encode(old.view(f"i{width}"), new.view(f"i{width}"))
        if kind != SAME:
            append(data, payload)
            write_at(self._file, at, new)
        return kind, len(payload)

    def _digest(self, name: str) -> str:
        total = hashlib.sha256()
        at, left = self._layout.offset(name), self._layout.infos[name].bytes
        while left:
            part = self._old[: min(left, BLOCK_BYTES)]
            read_at(self._file, at, part)
            total.update(part.data)
            at, left = at + len(part), left - len(part)
        return total.hexdigest()
