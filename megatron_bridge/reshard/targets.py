"""What a rollout engine's rank keeps: parameters, and the HuggingFace tensors that fill them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from megatron_bridge import regions
from megatron_bridge.regions import Box

_LISTED = 20  # faults that an error names


@dataclass(frozen=True, slots=True)
class Fill:
    """A box of a HuggingFace tensor and the place that a parameter keeps it in.

    Attributes:
        source: the tensor's name.
        source_box: an interval per dimension of that tensor.
        target_box: an interval per dimension of the parameter; of the same lengths, besides
            leading dimensions of length 1 (one expert of a stack).
    """

    source: str
    source_box: Box
    target_box: Box


@dataclass(frozen=True, slots=True)
class TargetParameter:
    """A parameter of one rank of an engine.

    Attributes:
        name: the engine's own.
        shape: the rank's own.
        fills: what it is made of; what no fill covers is zero (padding).
        dtype: of the parameter whatever the model's is ("float32"); None: the model's.
    """

    name: str
    shape: tuple[int, ...]
    fills: tuple[Fill, ...]
    dtype: str | None = None


Targets = Sequence[Sequence[TargetParameter]]


def check(targets: Targets, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse targets that do not fit a model of these HuggingFace tensors.

    Raises:
        ValueError: listing the faults.
    """
    found = list(dict.fromkeys(_faults(targets, shapes)))
    if found:
        more = [f"... and {len(found) - _LISTED} more"] if len(found) > _LISTED else []
        raise ValueError(
            "the rollout layout does not fit the model:\n- " + "\n- ".join(found[:_LISTED] + more)
        )


def _faults(targets: Targets, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    # Layers and experts are alike: each kind of fill and of parameter is looked at once.
    fitting: set[object] = set()
    for rank, parameters in enumerate(targets):
        for parameter in parameters:
            where = f"rank {rank}, '{parameter.name}'"
            boxes = tuple(fill.target_box for fill in parameter.fills)
            for fill in parameter.fills:
                key = (shapes.get(fill.source), fill.source_box, fill.target_box, parameter.shape)
                if key in fitting:
                    continue
                fault = _misfit(fill, parameter, shapes)
                if fault is None:
                    fitting.add(key)
                else:
                    yield f"{where}: {fault}"
            if boxes not in fitting:
                fault = _clash(boxes)
                if fault is None:
                    fitting.add(boxes)
                else:
                    yield f"{where}: {fault}"


def _misfit(
    fill: Fill, parameter: TargetParameter, shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    if fill.source not in shapes:
        return f"is filled from '{fill.source}', which {_unknown(fill.source, shapes)}"
    for box, shape, what in (
        (fill.source_box, shapes[fill.source], f"'{fill.source}'"),
        (fill.target_box, parameter.shape, "the parameter"),
    ):
        if not _within(box, shape):
            return f"the box {box} is not within {what} of shape {shape}"
    source, target = regions.lengths(fill.source_box), regions.lengths(fill.target_box)
    shared = min(len(source), len(target))
    cut = (len(source) - shared, len(target) - shared)
    if source[cut[0] :] != target[cut[1] :] or {*source[: cut[0]], *target[: cut[1]]} - {1}:
        return f"{source} elements of '{fill.source}' do not fill a box of {target}"
    return None


def _unknown(name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    if name == "lm_head.weight":
        return (
            "this model has not (its embeddings are tied); fill it from 'model.embed_tokens.weight'"
        )
    near = get_close_matches(name, shapes, n=1)
    return "the model does not have" + (f"; did you mean '{near[0]}'?" if near else "")


def _within(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
    )


def _clash(boxes: tuple[Box, ...]) -> str | None:
    """Says that two boxes of a parameter have an element in common."""
    ordered = sorted(box for box in boxes if regions.volume(box))
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if box and other[0][0] >= box[0][1]:
                break
            if len(box) == len(other) and regions.intersect(box, other) is not None:
                return f"two fills overlap, at {box} and {other}"
    return None
