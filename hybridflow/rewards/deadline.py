"""How long the call of a reward still has, for rewards that ask others."""

import math
import time
from contextvars import ContextVar

_END: ContextVar[float] = ContextVar("end", default=math.inf)


def set_deadline(seconds: float) -> None:
    """The call that this task makes next ends in ``seconds``."""
    _END.set(time.monotonic() + seconds)


def seconds_left() -> float:
    """Until the deadline of this ``async`` call; infinite where it has none."""
    return _END.get() - time.monotonic()
