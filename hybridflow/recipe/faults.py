"""What a user got wrong, collected so that all of it is reported at once."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One mistake: where it is (``file:line``), what is wrong and how to mend it."""

    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        end = "" if self.fix.endswith(("?", ".")) else "."
        return f"{self.where}: {self.what}. Fix: {self.fix}{end}"


class RecipeError(ValueError):
    """A recipe or a graph that cannot run; ``faults`` holds every reason."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        assert faults, "a RecipeError needs a fault"
        self.faults = list(faults)
        super().__init__("\n".join(map(str, self.faults)))
