"""What a proof found wrong. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass, field

_SHOWN_RANKS = 8


@dataclass(frozen=True)
class Problem:
    """One fault.

    Attributes:
        tensor: HuggingFace name; that of the Megatron tensor where no HuggingFace tensor has the
            element (padding).
        element: coordinates in that tensor; None where the fault is not of one element.
        ranks: those concerned, of the whole layout.
        what: the fault, in words.
    """

    tensor: str
    element: tuple[int, ...] | None
    ranks: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        where = "" if self.element is None else f", element {self.element},"
        return f"'{self.tensor}'{where} {self.what}"


@dataclass
class Problems:
    """Collects faults: the first ``limit`` in full, the others counted.

    A fault that is found from both sides (the HuggingFace tensor's and the rank's) counts once.
    """

    limit: int
    listed: list[Problem] = field(default_factory=list)
    count: int = 0
    _seen: set[tuple[str, tuple[int, ...] | str]] = field(default_factory=set)

    def add(
        self, tensor: str, element: tuple[int, ...] | None, ranks: Iterable[int], what: str
    ) -> None:
        """Note a fault."""
        key = (tensor, what if element is None else element)
        if key in self._seen:
            return
        self._seen.add(key)
        self.count += 1
        if len(self.listed) < self.limit:
            self.listed.append(Problem(tensor, element, tuple(sorted(ranks)), what))


def show(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0, 1, 2 and 125 more``."""
    numbers = sorted(ranks)
    text = ", ".join(map(str, numbers[:_SHOWN_RANKS]))
    more = len(numbers) - _SHOWN_RANKS
    return f"rank{'s' * (len(numbers) != 1)} {text}" + (f" and {more} more" if more > 0 else "")
