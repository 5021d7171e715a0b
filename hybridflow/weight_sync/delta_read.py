"""Building a whole version from a full one and the deltas after it."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hybridflow.weight_sync.delta_block import BLOCK_BYTES, DamagedBlock, decode
from hybridflow.weight_sync.delta_file import needing_space, read_at, write_at
from hybridflow.weight_sync.delta_manifest import (
    DATA,
    WEIGHTS,
    Manifest,
    NeedsFull,
    TensorDelta,
    chain,
    read_manifest,
)
from hybridflow.weight_sync.version import check_space
from megatron_bridge.huggingface.safetensors_file import DTYPES, SafetensorsFile


def whole_version(directory: str | Path, version: int, local: str | Path) -> Path:
    """A whole HuggingFace folder of ``version``: the shared one, or one built in ``local``.

    Args:
        directory: the shared folder, with a folder ``v<N>`` for each version.
        local: a folder of this machine that nobody else builds in. Versions that it holds are
            started from, and stay; remove them with ``remove_versions``. A build takes one model
            of space more.

    Raises:
        NeedsFull: something that ``version`` needs is missing or damaged; nothing was built.
        ValueError: too little space in ``local``.
    """
    directory, local = Path(directory), Path(local)
    for killed in local.glob(".v*"):  # what a process that was killed had begun
        shutil.rmtree(killed)
    built = local / f"v{version}"
    if (built / WEIGHTS).is_file():
        return built
    first, *later = chain(directory, version, _held(local))
    home = local if (local / f"v{first}" / WEIGHTS).is_file() else directory
    base = home / f"v{first}"
    if not later:
        return base
    return apply_deltas(base, [directory / f"v{number}" for number in later], built)


def apply_deltas(base: Path, deltas: Sequence[Path], target: Path) -> Path:
    """Write the folder ``target``: ``base`` with ``deltas`` (folders ``v<N>``) applied in order.

    Each block goes through all deltas at once, so a long chain costs little more than a short
    one. The bytes of the base and of the result are proven by SHA-256, tensor by tensor. Written
    aside and renamed: ``target`` is whole or absent.

    Raises:
        NeedsFull: a delta is damaged or does not fit what it is applied to.
        ValueError: too little space.
    """
    version = int(deltas[-1].name.removeprefix("v"))
    manifests = [read_manifest(path, int(path.name.removeprefix("v"))) for path in deltas]
    _check_links(manifests, version)
    aside = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}"
    aside.mkdir(parents=True, mode=0o700)
    try:
        source = _open_base(base / WEIGHTS, manifests[0], version)
        check_space(target.parent, source.path.stat().st_size)
        with needing_space(target.parent, f"version {version}"):
            with _Build(source, aside / WEIGHTS, deltas, version) as build:
                for name in source.infos:
                    build.tensor(name, [manifest.tensors[name] for manifest in manifests])
            _copy_companions(base, aside)
            aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


class _Build:
    """The open files of one build; one block is in memory at a time."""

    def __init__(
        self, source: SafetensorsFile, target: Path, deltas: Sequence[Path], version: int
    ) -> None:
        self._source, self._version = source, version
        self._block = np.empty(BLOCK_BYTES, np.uint8)
        self._stack = ExitStack()
        with ExitStack() as stack:
            self._base = stack.enter_context(source.path.open("rb", buffering=0))
            self._target = stack.enter_context(target.open("xb", buffering=0))
            self._deltas = [
                stack.enter_context((path / DATA).open("rb", buffering=0)) for path in deltas
            ]
            self._copy_header()
            self._stack = stack.pop_all()

    def __enter__(self) -> _Build:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _copy_header(self) -> None:
        size = self._source.path.stat().st_size
        os.posix_fallocate(self._target.fileno(), 0, size)
        header = np.empty(min(map(self._source.offset, self._source.infos)), np.uint8)
        read_at(self._base, 0, header)
        write_at(self._target, 0, header)

    def tensor(self, name: str, changes: Sequence[TensorDelta]) -> None:
        """Write one tensor after all ``changes``; NeedsFull unless base and result are proven."""
        info, at = self._source.infos[name], self._source.offset(name)
        before, after = hashlib.sha256(), hashlib.sha256()
        places = [change.begin for change in changes]
        for index, start in enumerate(range(0, info.bytes, BLOCK_BYTES)):
            block = self._block[: min(BLOCK_BYTES, info.bytes - start)]
            self._read(self._base, at + start, block, name)
            before.update(block.data)
            for delta, change in enumerate(changes):
                if change.blocks:
                    kind, length = change.blocks[index]
                    payload = np.empty(length, np.uint8)
                    self._read(self._deltas[delta], places[delta], payload, name)
                    self._decode(block.view(f"i{info.dtype.itemsize}"), kind, payload, name)
                    places[delta] += length
            after.update(block.data)
            write_at(self._target, at + start, block)
        if before.hexdigest() != changes[0].base:
            self._refuse(f"{self._source.path}: '{name}' is not what the delta starts from")
        if after.hexdigest() != changes[-1].result:
            self._refuse(f"'{name}' comes out with another digest than the trainer's")

    def _read(self, file: BinaryIO, at: int, into: np.ndarray, name: str) -> None:
        try:
            read_at(file, at, into)
        except EOFError as error:
            self._refuse(f"{file.name} at '{name}': {error}")

    def _decode(self, block: np.ndarray, kind: str, payload: np.ndarray, name: str) -> None:
        try:
            decode(block, kind, payload.tobytes())
        except DamagedBlock as error:
            self._refuse(f"a block of '{name}' is damaged: {error}")

    def _refuse(self, why: str) -> None:
        raise NeedsFull(self._version, why)


def _check_links(manifests: Sequence[Manifest], version: int) -> None:
    """Each delta starts where the one before it ends."""
    for first, second in zip(manifests, manifests[1:], strict=False):
        follows = second.base_version == first.version
        if not follows or second.digest("base") != first.digest("result"):
            raise NeedsFull(
                version,
                f"delta {second.version} starts from another version {second.base_version} than "
                f"the one that delta {first.version} makes",
            )


def _open_base(path: Path, manifest: Manifest, version: int) -> SafetensorsFile:
    """The base's file, whose tensors must be those of the delta."""
    try:
        source = SafetensorsFile(path)
    except (OSError, ValueError) as error:
        raise NeedsFull(version, f"its base is damaged: {error}") from error
    held = {name: (info.dtype, tuple(info.shape)) for name, info in source.infos.items()}
    wanted = {name: (DTYPES.get(t.dtype), t.shape) for name, t in manifest.tensors.items()}
    counts = {name: (0, -(-info.bytes // BLOCK_BYTES)) for name, info in source.infos.items()}
    differing = {n for n in held.keys() | wanted.keys() if held.get(n) != wanted.get(n)}
    differing |= {n for n, t in manifest.tensors.items() if len(t.blocks) not in counts.get(n, ())}
    if differing:
        raise NeedsFull(
            version, f"{path} holds other tensors than the delta, among them {min(differing)!r}"
        )
    return source


def _copy_companions(base: Path, target: Path) -> None:
    """The config and the tokenizer's files; links stay links."""
    for path in base.iterdir():
        if path.is_file() and path.name != WEIGHTS:
            shutil.copy2(path, target / path.name, follow_symlinks=False)


def _held(local: Path) -> Collection[int]:
    """Whole versions in ``local``."""
    folders = [path for path in local.glob("v[0-9]*") if (path / WEIGHTS).is_file()]
    return {int(path.name[1:]) for path in folders if path.name[1:].isdigit()}
