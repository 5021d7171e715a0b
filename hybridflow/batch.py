"""What travels between roles: the fields of a step's prompts and samples.

A step has P prompts and G samples a prompt. Splitting and slicing give views of the same memory;
what crosses processes is described in ``hybridflow.ragged``: nothing may write to a received
batch in place (``clone()`` gives one that may be written to).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hybridflow.ragged import Packed, Ragged, join, pack, unpack
from hybridflow.recipe.axes import Axis
from hybridflow.recipe.names import hint

__all__ = ["Batch", "Data", "Ragged"]

Data = Tensor | Ragged | list[Any]


@dataclass(frozen=True, eq=False)
class Batch:
    """Named fields of P prompts with G samples each.

    Fields on ``PROMPTS`` have P rows, on ``SAMPLES`` P*G (sample i belongs to prompt i // G), on
    ``TOKENS`` they are ragged with P*G rows, all of the same lengths. ``RUN`` fields are any
    object and are never split. Constructor: ``ValueError`` names the field that does not fit.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, Axis] = field(default_factory=dict)
    prompts: int = 0
    samples_per_prompt: int = 1

    def __post_init__(self) -> None:
        if self.prompts < 0 or self.samples_per_prompt < 1:
            raise ValueError(
                f"a batch needs prompts >= 0 and samples_per_prompt >= 1, got {self.prompts} "
                f"and {self.samples_per_prompt}"
            )
        if unmatched := set(self.fields) ^ set(self.axes):
            raise ValueError(f"fields and axes differ in: {', '.join(sorted(unmatched))}")
        tokens: tuple[str, Ragged] | None = None
        for name, data in self.fields.items():
            self._check_rows(name, data)
            if self.axes[name] is Axis.TOKENS:
                tokens = tokens or (name, data)
                _check_lengths(name, data, *tokens)

    def _check_rows(self, name: str, data: Any) -> None:
        axis = self.axes[name]
        if axis is Axis.RUN:
            return
        expected = self.rows_on(axis)
        if axis is Axis.TOKENS and not isinstance(data, Ragged):
            raise ValueError(f"field '{name}': a tokens field is Ragged, got {type(data).__name__}")
        if not isinstance(data, Tensor | Ragged | list):
            raise ValueError(
                f"field '{name}': expected a tensor, Ragged or list, got {type(data).__name__}"
            )
        rows = None if isinstance(data, Tensor) and data.dim() == 0 else len(data)
        if rows != expected:
            raise ValueError(
                f"field '{name}': {axis.value} fields of this batch have {expected} rows "
                f"(P={self.prompts}, G={self.samples_per_prompt}), got {rows}"
            )

    def rows_on(self, axis: Axis) -> int:
        """Number of rows of a field on ``axis`` (not ``RUN``)."""
        return self.prompts if axis is Axis.PROMPTS else self.samples

    @property
    def samples(self) -> int:
        """P * G."""
        return self.prompts * self.samples_per_prompt

    @property
    def nbytes(self) -> int:
        """Bytes of tensors in the batch; lists count nothing."""
        return sum(getattr(data, "nbytes", 0) for data in self.fields.values())

    def __getitem__(self, name: str) -> Any:
        if name not in self.fields:
            raise ValueError(f"the batch has no field '{name}': {hint(name, self.fields)}")
        return self.fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def select(self, names: Iterable[str]) -> Batch:
        """The named fields alone."""
        return self._rebuild({name: (self.axes.get(name), self[name]) for name in names})

    def rename(self, names: Mapping[str, str]) -> Batch:
        """Fields under new names, ``{old: new}``; the others keep theirs."""
        new = [names.get(name, name) for name in self.fields]
        if missing := [old for old in names if old not in self.fields]:
            raise ValueError(
                f"the batch has no field '{missing[0]}': {hint(missing[0], self.fields)}"
            )
        if twice := {name for name in new if new.count(name) > 1}:
            raise ValueError(f"two fields would be named: {', '.join(sorted(twice))}")
        renamed = zip(new, self.fields.items(), strict=True)
        return self._rebuild({name: (self.axes[old], data) for name, (old, data) in renamed})

    def with_field(self, name: str, axis: Axis, data: Any) -> Batch:
        """With one more field, which takes the place of one of the same name."""
        items = {old: (self.axes[old], value) for old, value in self.fields.items()}
        return self._rebuild({**items, name: (axis, data)})

    def union(self, other: Batch) -> Batch:
        """The fields of both, which must be of the same P and G and share no name."""
        if (self.prompts, self.samples_per_prompt) != (other.prompts, other.samples_per_prompt):
            raise ValueError(
                f"union of batches of {self.prompts} x {self.samples_per_prompt} and "
                f"{other.prompts} x {other.samples_per_prompt} samples"
            )
        if both := set(self.fields) & set(other.fields):
            raise ValueError(f"union: both batches have {', '.join(sorted(both))}")
        fields, axes = {**self.fields, **other.fields}, {**self.axes, **other.axes}
        return Batch(fields, axes, self.prompts, self.samples_per_prompt)

    def slice(self, start: int, stop: int) -> Batch:
        """Prompts ``start`` to ``stop`` with all their samples, as views."""
        groups = self.samples_per_prompt

        def cut(name: str, data: Any) -> Any:
            axis = self.axes[name]
            if axis is Axis.RUN:
                return data
            scale = 1 if axis is Axis.PROMPTS else groups
            return data[start * scale : stop * scale]

        fields = {name: cut(name, data) for name, data in self.fields.items()}
        return Batch(fields, self.axes, stop - start, groups)

    def split(self, parts: int) -> list[Batch]:
        """``parts`` runs of whole prompts as views; the first ones are larger by one prompt when
        P is no multiple of ``parts``, the last ones empty when P is smaller."""
        if parts < 1:
            raise ValueError(f"a batch is split into at least one part, got {parts}")
        base, extra = divmod(self.prompts, parts)
        ends = [base * part + min(part, extra) for part in range(parts + 1)]
        return [self.slice(*ends[part : part + 2]) for part in range(parts)]

    def take(self, prompts: Sequence[int]) -> Batch:
        """A copy of the given prompts with all their samples, in the given order."""
        groups = self.samples_per_prompt
        samples = [prompt * groups + sample for prompt in prompts for sample in range(groups)]

        def pick(name: str, data: Any) -> Any:
            axis = self.axes[name]
            if axis is Axis.RUN:
                return data
            rows = list(prompts) if axis is Axis.PROMPTS else samples
            if isinstance(data, Ragged):
                return data.take(rows)
            return data[rows] if isinstance(data, Tensor) else [data[row] for row in rows]

        fields = {name: pick(name, data) for name, data in self.fields.items()}
        return Batch(fields, self.axes, len(prompts), groups)

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """The prompts of all parts in order: the inverse of ``split``. ``RUN`` fields come from
        the first part. Parts must have the same fields, axes, dtypes and G."""
        if not parts:
            raise ValueError("concat needs at least one batch")
        first = parts[0]
        if len(parts) == 1:
            return first
        for part in parts[1:]:
            if part.samples_per_prompt != first.samples_per_prompt or part.axes != first.axes:
                raise ValueError(f"concat of batches that differ: {first} and {part}")
        fields = {name: _concat_field(name, parts) for name in first.fields}
        prompts = sum(part.prompts for part in parts)
        return Batch(fields, first.axes, prompts, first.samples_per_prompt)

    def clone(self) -> Batch:
        """A copy whose tensors may be written to; lists are copied shallowly."""
        fields = {
            name: data.clone()
            if isinstance(data, Tensor | Ragged)
            else list(data)
            if isinstance(data, list)
            else data
            for name, data in self.fields.items()
        }
        return Batch(fields, self.axes, self.prompts, self.samples_per_prompt)

    def equals(self, other: object) -> bool:
        """Same sizes, fields, axes and values."""
        return (
            isinstance(other, Batch)
            and (self.prompts, self.samples_per_prompt) == (other.prompts, other.samples_per_prompt)
            and dict(self.axes) == dict(other.axes)
            and all(_same(data, other.fields[name]) for name, data in self.fields.items())
        )

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {axis.value}" for name, axis in self.axes.items())
        return f"Batch({self.prompts} x {self.samples_per_prompt} samples; {fields})"

    def __reduce__(self) -> tuple[Any, ...]:
        packed = {
            name: pack(data) if isinstance(data, Tensor) else data
            for name, data in self.fields.items()
        }
        return _unpack_batch, (packed, dict(self.axes), self.prompts, self.samples_per_prompt)

    def _rebuild(self, items: dict[str, tuple[Any, Any]]) -> Batch:
        fields = {name: data for name, (_, data) in items.items()}
        axes = {name: axis for name, (axis, _) in items.items()}
        return Batch(fields, axes, self.prompts, self.samples_per_prompt)


def _unpack_batch(
    packed: dict[str, Any], axes: dict[str, Axis], prompts: int, samples_per_prompt: int
) -> Batch:
    fields = {
        name: unpack(data) if isinstance(data, Packed) else data for name, data in packed.items()
    }
    return Batch(fields, axes, prompts, samples_per_prompt)


def _concat_field(name: str, parts: Sequence[Batch]) -> Any:
    pieces = [part.fields[name] for part in parts]
    if parts[0].axes[name] is Axis.RUN:
        return pieces[0]
    kinds = {(type(p), getattr(p, "dtype", None)) for p in pieces}
    if len(kinds) > 1:
        raise ValueError(f"field '{name}': concat of pieces of different kinds or dtypes: {kinds}")
    if isinstance(pieces[0], Ragged):
        return Ragged.concat(pieces)
    if isinstance(pieces[0], Tensor):
        return join(pieces)
    return list(chain.from_iterable(pieces))


def _check_lengths(name: str, data: Ragged, first_name: str, first: Ragged) -> None:
    if data.offsets is first.offsets or torch.equal(data.offsets, first.offsets):
        return
    row = int((data.lengths != first.lengths).nonzero()[0])
    raise ValueError(
        f"field '{name}': row {row} has {int(data.lengths[row])} values where '{first_name}' has "
        f"{int(first.lengths[row])}; all tokens fields of a batch have the same lengths"
    )


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Ragged):
        return left.equals(right)
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)
