"""The axes a field of the dataflow may have, and the type of a field."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Axis(StrEnum):
    """What one row of a field stands for.

    A step has P prompts and G samples a prompt. ``PROMPTS`` fields have P rows, ``SAMPLES``
    fields P*G rows (sample i belongs to prompt i // G), ``TOKENS`` fields P*G ragged rows with
    one value per response token, ``RUN`` fields one value for the whole run.
    """

    RUN = "run"
    PROMPTS = "prompts"
    SAMPLES = "samples"
    TOKENS = "tokens"


Dtype = Literal["ids", "int", "float", "bool", "vectors", "object"]


@dataclass(frozen=True)
class FieldType:
    """Axis and element type of a field; ``ids`` are ragged token ids, one row per prompt;
    ``vectors`` are floats, several a row.

    Attributes:
        quantity: what the numbers are, such as log-probabilities; empty: any.
    """

    axis: Axis
    dtype: Dtype
    description: str = ""
    quantity: str = ""

    def __str__(self) -> str:
        told = f" ({self.quantity})" if self.quantity else ""
        return f"{self.axis.value} of {self.dtype}{told}"

    def accepts(self, given: "FieldType") -> bool:
        """Whether a field of type ``given`` can stand for one of this type."""
        if (self.axis, self.dtype) != (given.axis, given.dtype):
            return False
        return "" in (self.quantity, given.quantity) or self.quantity == given.quantity
