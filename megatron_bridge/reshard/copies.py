"""One copy of a plan: a box of a trainer rank's tensor and its place in a parameter."""

from dataclasses import dataclass

from megatron_bridge import regions
from megatron_bridge.regions import Box, Interval


@dataclass(frozen=True, slots=True)
class View:
    """``tensor[rows[0]:rows[1]].view(sizes)[box].permute(order)`` of a trainer rank's tensor.

    Attributes:
        rows: of the tensor's first dimension.
        sizes: of the axes that these rows are seen by.
        box: an interval per axis.
        order: a permutation of the axes.
    """

    rows: Interval
    sizes: tuple[int, ...]
    box: Box
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements that go from trainer ranks to one rank of an engine.

    Attributes:
        weight: index in ``mappings.weights(config)``.
        source: of the sending rank's own tensor of that weight.
        target_rank: rank within the engine.
        parameter: index among that rank's parameters.
        target: an interval per dimension of the parameter. The source's elements, in their order,
            fill it in its order.
        holders: trainer ranks that hold exactly these elements at ``source``, ascending. The copy
            of a tied embedding on the last pipeline stage does not count.
    """

    weight: int
    source: View
    target_rank: int
    parameter: int
    target: Box
    holders: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return regions.volume(self.target)
