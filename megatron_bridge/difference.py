"""Compares two checkpoints of any kind and layout, tensor by tensor, in bounded memory."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.convert.kinds import COMPANIONS, Kind, adapter_weights, kind_of
from megatron_bridge.convert.plan import cut
from megatron_bridge.convert.sources import open_checkpoint
from megatron_bridge.huggingface.folder import HuggingFaceFolder, open_weights
from megatron_bridge.huggingface.quantized import dequantized
from megatron_bridge.source import Ranges, Source, TensorInfo, whole
from megatron_bridge.torch_dist import reader

_PIECE_ELEMENTS = 2**20
_SHOWN = 40


@dataclass
class Difference:
    """How a tensor differs.

    Attributes:
        name: of the tensor, HuggingFace's.
        shapes, dtypes: of both, where they differ.
        max_absolute: largest difference; infinite where one has a NaN or infinity and the other
            has not the same; None when shapes differ.
        max_relative: the same, relative to the largest element of either tensor.
        elements: how many differ.
    """

    name: str
    shapes: tuple[list[int], list[int]] | None = None
    dtypes: tuple[str, str] | None = None
    max_absolute: float | None = None
    max_relative: float | None = None
    elements: int = 0


@dataclass
class Comparison:
    """Two checkpoints side by side.

    Attributes:
        only_in_a, only_in_b: names of tensors that the other lacks.
        differences: tensors that differ by more than the tolerance, or in shape or dtype.
        compared: how many tensors both have.
        max_absolute, max_relative: over all compared tensors, within the tolerance or not.
        bitwise: all bits agree; False as well where only the sign of a zero or the bits of a NaN
            differ, which are no different numbers.
    """

    a: str
    b: str
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    compared: int = 0
    max_absolute: float = 0.0
    max_relative: float = 0.0
    bitwise: bool = True

    @property
    def equal(self) -> bool:
        """True when nothing differs."""
        return not (self.only_in_a or self.only_in_b or self.differences)

    def as_json(self) -> dict[str, Any]:
        """Plain values; infinities as JSON has none are the text "inf"."""
        return _finite({"equal": self.equal, **asdict(self)})


def compare(
    one: Path, other: Path, tolerance: float = 0.0, config: Path | None = None
) -> Comparison:
    """Compare two checkpoints.

    A NaN equals a NaN at the same place. Dtypes must agree.

    Args:
        one, other: folders of any kind, or single weight files.
        tolerance: largest difference, relative to the tensor's largest element, that is none.
        config: the HuggingFace folder of the model, for a Megatron checkpoint that brings none.

    Raises:
        ValueError: when one cannot be read.
    """
    a, b = _open_both(one, other, config)
    here, there = a.tensors(), b.tensors()
    found = Comparison(
        str(one),
        str(other),
        only_in_a=[name for name in here if name not in there],
        only_in_b=[name for name in there if name not in here],
    )
    torch.set_num_threads(1)
    for name in here:
        if name in there:
            _compare_tensor(found, name, (a, b), tolerance)
    return found


def _open_both(one: Path, other: Path, config: Path | None) -> tuple[Source, Source]:
    """Two Megatron checkpoints that do not say which model they are compare by their own keys."""
    folders = [reader.find(path) for path in (one, other) if path.is_dir()]
    found = [folder for folder in folders if folder is not None]
    if len(found) == 2 and config is None and not all(map(_says_model, found)):
        return reader.TorchDist(found[0]), reader.TorchDist(found[1])
    return _open(one, config), _open(other, config)


def _says_model(folder: Path) -> bool:
    return (folder.parent / COMPANIONS / "config.json").is_file()


def _open(path: Path, config: Path | None) -> Source:
    """What is there, not what should be: missing tensors are a difference, not an error."""
    kind = kind_of(path)
    if kind in (Kind.MEGATRON, Kind.ENGINE):
        return open_checkpoint(path, config=config).source
    if kind is Kind.HUGGINGFACE:
        folder = HuggingFaceFolder(path)
        return dequantized(folder, folder.config())
    return _File(adapter_weights(path) if kind is Kind.ADAPTER else path)


class _File:
    """One weight file as a source."""

    def __init__(self, path: Path) -> None:
        self._file = open_weights(path)

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._file.infos

    def read(self, name: str, ranges: Ranges) -> Tensor:
        return self._file.read(name, ranges)


def _compare_tensor(
    found: Comparison, name: str, sources: tuple[Source, Source], tolerance: float
) -> None:
    infos = [source.tensors()[name] for source in sources]
    difference = Difference(name)
    found.compared += 1
    if infos[0].dtype != infos[1].dtype:
        a, b = (str(info.dtype).removeprefix("torch.") for info in infos)
        difference.dtypes = (a, b)
    if infos[0].shape != infos[1].shape:
        difference.shapes = (list(infos[0].shape), list(infos[1].shape))
    else:
        found.bitwise &= _measure(difference, sources, infos[0].shape)
        found.max_absolute = max(found.max_absolute, difference.max_absolute or 0.0)
        found.max_relative = max(found.max_relative, difference.max_relative or 0.0)
    if difference.dtypes or difference.shapes or (difference.max_relative or 0.0) > tolerance:
        found.differences.append(difference)
        found.bitwise = False


def _measure(
    difference: Difference, sources: tuple[Source, Source], shape: tuple[int, ...]
) -> bool:
    """Fill in the numbers; returns whether all bits agree."""
    absolute = largest = 0.0
    bitwise = True
    for ranges in cut(whole(shape), _PIECE_ELEMENTS) if math.prod(shape) else ():
        a, b = (source.read(difference.name, ranges) for source in sources)
        if _same_bits(a, b):
            largest = max(largest, _largest(a.double()))
            continue
        bitwise = False
        distance = _distance(a, b)
        difference.elements += int(torch.count_nonzero(distance))
        absolute = max(absolute, float(distance.max()))
        largest = max(largest, _largest(a.double()), _largest(b.double()))
    difference.max_absolute = absolute
    difference.max_relative = _relative(absolute, largest)
    return bitwise


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype:
        return False
    one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(one, other)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Per element; equal infinities and two NaNs are 0 apart, anything else odd is infinite."""
    one, other = a.double(), b.double()
    distance = (one - other).abs()
    distance = torch.where(distance.isfinite(), distance, torch.inf)
    same = (one == other) | (one.isnan() & other.isnan())
    if a.dtype == b.dtype and not a.is_floating_point():
        same = a == b  # float64 cannot tell neighbours among large whole numbers apart
        distance = distance.clamp(min=1.0)
    return torch.where(same, 0.0, distance)


def _largest(tensor: Tensor) -> float:
    """The largest finite absolute value."""
    return float(torch.nan_to_num(tensor.abs(), nan=0.0, posinf=0.0).max())


def _relative(absolute: float, largest: float) -> float:
    if absolute == 0.0:
        return 0.0
    return absolute / largest if largest else math.inf


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return "inf" if content == math.inf else content


def text(found: Comparison) -> str:
    """For people: what differs, and a closing line."""
    lines = [f"only in A: {name}" for name in found.only_in_a]
    lines += [f"only in B: {name}" for name in found.only_in_b]
    lines += [_line(difference) for difference in found.differences]
    if len(lines) > _SHOWN:
        lines = [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more (all with --json)"]
    verdict = "equal" if found.equal else "different"
    if found.equal and found.bitwise:
        verdict = "equal bit for bit"
    lines.append(
        f"{verdict}: {found.compared} tensors compared, {len(found.differences)} differ, "
        f"{len(found.only_in_a)} only in A, {len(found.only_in_b)} only in B; largest difference "
        f"{found.max_absolute:.3g}, relative {found.max_relative:.3g}"
    )
    if found.equal and not found.bitwise and not found.max_absolute:
        lines.append("not bit for bit: zeros differ in sign, or NaNs in their bits")
    return "\n".join(lines)


def _line(difference: Difference) -> str:
    parts = []
    if difference.shapes:
        parts.append(f"shape {difference.shapes[0]} against {difference.shapes[1]}")
    if difference.dtypes:
        parts.append(f"dtype {difference.dtypes[0]} against {difference.dtypes[1]}")
    if difference.max_absolute:
        parts.append(
            f"{difference.elements:,} elements differ, by up to {difference.max_absolute:.3g} "
            f"(relative {difference.max_relative:.3g})"
        )
    return f"{difference.name}: {'; '.join(parts)}"
