"""A rank's own tensor: each element is one HuggingFace element or padding. Imports no torch."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from megatron_bridge import regions, sharding
from megatron_bridge.mappings import Weight
from megatron_bridge.proof import boxes
from megatron_bridge.proof.homes import Home
from megatron_bridge.proof.problems import Problems, show
from megatron_bridge.regions import Box
from megatron_bridge.registry import PADDED
from megatron_bridge.row_shape import Piece


class Source(NamedTuple):
    """Where elements of a home come from: a box of one of the weight's parts."""

    part: int
    box: Box


def check_home(weight: Weight, home: Home, parts: int, problems: Problems) -> list[Source]:
    """Check one home's tensor, and that exporting it is the inverse of loading it.

    Args:
        parts: into how many the weight is cut.

    Returns:
        Every box of a HuggingFace tensor that fills it.
    """
    _check_rows(weight, home, parts, problems)
    whole, real = full_box(weight, parts), full_box(weight, 1)
    found = []
    for holding in home.holdings:
        if not boxes.contains(whole, holding.box):
            what = f"on {show(home.ranks)} is to hold {holding.box} of a tensor that is {whole}"
            problems.add(_name(weight), None, home.ranks, what)
            continue
        pieces = list(weight.pieces(holding.box))
        _check_filled(weight, home, regions.intersect(holding.box, real), pieces, problems)
        for piece in pieces:
            _check_piece(weight, home, piece, problems)
            found.append(Source(piece.part, piece.huggingface))
    return found


def full_box(weight: Weight, parts: int) -> Box:
    """All of the Megatron tensor, padded for ``parts`` ranks; with 1 without padding."""
    return regions.full(size for dimension in weight.sizes(parts) for size in dimension)


def check_padding(weight: Weight, found: list[Home], parts: int, problems: Problems) -> None:
    """Over all homes each element of the padded tensor is there once, and only rows are padded."""
    whole, real = full_box(weight, parts), full_box(weight, 1)
    for axis, padded, own in zip(weight.axes.names, whole, real, strict=True):
        if padded[1] < own[1] or (padded != own and axis != PADDED):
            what = f"has {padded[1]} places on its axis {axis}, which is {own[1]} long"
            problems.add(_name(weight), None, (), what)
    held = [(home, holding.box) for home in found for holding in home.holdings]
    held = [(home, box) for home, box in held if boxes.contains(whole, box)]
    twice = boxes.clash([box for _, box in held])
    if twice is not None:
        ranks = held[twice[0]][0].ranks | held[twice[1]][0].ranks
        _report(weight, twice[2], ranks, f"has two homes among {show(ranks)}", problems)
    lost = boxes.hole(whole, [box for _, box in held], disjoint=twice is None)
    if lost is not None:
        _report(weight, lost, (), "is on no rank", problems)


def _check_rows(weight: Weight, home: Home, parts: int, problems: Problems) -> None:
    """The holdings are all rows of the local tensor, once each."""
    shape = sharding.local_shape(weight, parts)
    at, depths = 0, [len(dimension) for dimension in weight.axes.dimensions]
    for holding in sorted(home.holdings, key=lambda one: one.rows):
        if holding.rows[0] != at:
            state = "filled twice" if holding.rows[0] < at else "filled by nothing"
            row = min(holding.rows[0], at)
            what = f"has row {row} of its tensor on {show(home.ranks)} {state}"
            problems.add(_name(weight), (row, *(0,) * (len(shape) - 1)), home.ranks, what)
        lengths = [math.prod(regions.lengths(box)) for box in _dimensions(holding.box, depths)]
        if lengths != [holding.rows[1] - holding.rows[0], *shape[1:]]:
            what = (
                f"puts {lengths} elements of {holding.box} into rows {holding.rows} of a tensor "
                f"of shape {shape} on {show(home.ranks)}"
            )
            problems.add(_name(weight), None, home.ranks, what)
        at = holding.rows[1]
    if at != shape[0]:
        what = f"fills {at} of the {shape[0]} rows of its tensor on {show(home.ranks)}"
        problems.add(_name(weight), (min(at, shape[0]), *(0,) * (len(shape) - 1)), home.ranks, what)


def _dimensions(box: Box, depths: list[int]) -> Iterator[Box]:
    for depth in depths:
        yield box[:depth]
        box = box[depth:]


def _check_filled(
    weight: Weight, home: Home, real: Box | None, pieces: list[Piece], problems: Problems
) -> None:
    """The pieces fill the part of a holding that is not padding, each element once."""
    outside = [p for p in pieces if real is None or not boxes.contains(real, p.megatron)]
    for piece in outside:
        what = f"is loaded outside of what {show(home.ranks)} holds, to {piece.megatron}"
        problems.add(*_huggingface(weight, piece), home.ranks, what)
    if real is None or outside:
        return
    targets = [piece.megatron for piece in pieces]
    twice = boxes.clash(targets)
    if twice is not None:
        what = f"and another are both loaded to {twice[2]} of '{_name(weight)}'"
        ranks = home.ranks
        problems.add(*_huggingface(weight, pieces[twice[1]]), ranks, f"{what} on {show(ranks)}")
    empty = boxes.hole(real, targets, disjoint=twice is None)
    if empty is not None:
        _report(weight, empty, home.ranks, f"is not loaded on {show(home.ranks)}", problems)


def _check_piece(weight: Weight, home: Home, piece: Piece, problems: Problems) -> None:
    """The two boxes have the same elements in the same order, and export finds the way back."""
    part = weight.parts[piece.part]
    if not boxes.contains(part.box, piece.huggingface):
        what = f"is where the tensor's part {part.box} does not reach ({piece.huggingface})"
        problems.add(*_huggingface(weight, piece), home.ranks, what)
        return
    samples = _samples(piece.huggingface, piece.megatron, piece.order)
    if not samples:
        what = f"cannot become {piece.megatron} with the axes {piece.order}"
        what = f"in {piece.huggingface} {what}"
        problems.add(*_huggingface(weight, piece), home.ranks, what)
    for huggingface, megatron in samples:
        back = weight.to_megatron(piece.part, huggingface)
        if back != megatron:
            element = boxes.element(part.sizes, boxes.start(huggingface), part.rows[0])
            what = (
                f"is loaded to {boxes.start(megatron)} of '{_name(weight)}' on {show(home.ranks)} "
                f"and exported from {boxes.start(back)}"
            )
            problems.add(part.name, element, home.ranks, what)
            return


@lru_cache(maxsize=4096)
def _samples(
    huggingface: Box, megatron: Box, order: tuple[int | None, ...]
) -> tuple[tuple[Box, Box], ...]:
    """The whole piece, its first and last element, and one step along each axis.

    A map of boxes that moves each axis by itself and agrees on these agrees everywhere. None where
    the boxes cannot be the same elements.
    """
    theirs = regions.lengths(huggingface)
    if not _same_shape(theirs, regions.lengths(megatron), order):
        return ()
    low, there = boxes.start(huggingface), boxes.start(megatron)
    found = [(huggingface, megatron)]
    for steps in _steps(theirs):
        moved = (0 if axis is None else steps[axis] for axis in order)
        found.append(
            (
                boxes.at(tuple(a + b for a, b in zip(low, steps, strict=True))),
                boxes.at(tuple(a + b for a, b in zip(there, moved, strict=True))),
            )
        )
    return tuple(found)


def _same_shape(
    theirs: tuple[int, ...], ours: tuple[int, ...], order: tuple[int | None, ...]
) -> bool:
    """Each axis has its length and is used once; axes left out are of length 1."""
    used = [axis for axis in order if axis is not None]
    return (
        len(order) == len(ours)
        and len(set(used)) == len(used)
        and all(
            length == (1 if axis is None else theirs[axis])
            for axis, length in zip(order, ours, strict=True)
        )
        and all(length == 1 for axis, length in enumerate(theirs) if axis not in used)
    )


def _steps(lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    yield (0,) * len(lengths)
    yield tuple(length - 1 for length in lengths)
    for axis, length in enumerate(lengths):
        if length > 1:
            yield (*(0,) * axis, 1, *(0,) * (len(lengths) - axis - 1))


def _report(
    weight: Weight,
    position: tuple[int, ...],
    ranks: frozenset[int] | tuple[()],
    what: str,
    problems: Problems,
) -> None:
    """Names the HuggingFace element at a position of the Megatron tensor, where it has one."""
    piece = next(weight.pieces(boxes.at(position)), None)
    if piece is None:
        element = boxes.element(weight.sizes(), position)
        problems.add(_name(weight), element, ranks, f"(of no HuggingFace tensor) {what}")
    else:
        problems.add(*_huggingface(weight, piece), ranks, what)


def _huggingface(weight: Weight, piece: Piece) -> tuple[str, tuple[int, ...]]:
    """The name of a piece's HuggingFace tensor and its first element there."""
    part = weight.parts[piece.part]
    position = boxes.start(piece.huggingface)
    return part.name, boxes.element(part.sizes, position, part.rows[0])


def _name(weight: Weight) -> str:
    return weight.row.megatron.format(layer=weight.layer, expert=weight.expert)
