"""Moves the elements of a reshard plan's copies between tensors."""

from torch import Tensor

from megatron_bridge import regions
from megatron_bridge.regions import Box
from megatron_bridge.reshard.copies import Copy, View


def read(tensor: Tensor, view: View) -> Tensor:
    """A view's elements: a view of ``tensor``, nothing is copied.

    Returns:
        One dimension per axis of the view. Its elements, in order, fill the copy's target box in
        that box's order; ``put`` takes them as they are.
    """
    rows = tensor[view.rows[0] : view.rows[1]].view(view.sizes)
    return rows[regions.slices(view.box)].permute(view.order)


def put(parameter: Tensor, box: Box, values: Tensor) -> None:
    """Copy ``values`` (any shape with the box's elements in order) into a box of a parameter.

    One strided copy; casts to the parameter's dtype.
    """
    target = parameter[regions.slices(box)]
    if values.is_contiguous():
        target.copy_(values.view(target.shape))
    else:  # the axes of a dimension: splitting it never copies
        target.view(values.shape).copy_(values)


def move(copy: Copy, tensor: Tensor, parameter: Tensor) -> None:
    """A copy from its holder's tensor into its parameter, both at hand."""
    put(parameter, copy.target, read(tensor, copy.source))


def move_back(copy: Copy, parameter: Tensor, tensor: Tensor) -> None:
    """A copy of ``inverse`` from an engine's parameter into a holder's tensor."""
    target = read(tensor, copy.source)
    values = parameter[regions.slices(copy.target)]
    target.copy_(values.view(target.shape))
