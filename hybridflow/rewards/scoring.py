"""Scoring a batch under a deadline, with errors that name the function and the sample."""

import faulthandler
import math
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from hybridflow.rewards.registry import RewardFunction

_EXCERPT_CHARACTERS = 200
_GRACE_SECONDS = 10.0


class RewardError(RuntimeError):
    """A reward function raised, or returned what is no finite number."""


class RewardTimeout(RewardError):
    """A reward function did not come back in time. Its thread still runs: end the process."""


@dataclass(frozen=True)
class RewardItem:
    """One response to score, and the row of data it answers."""

    prompt: str
    response: str
    answer: Any
    row: dict[str, Any]


@dataclass
class _Progress:
    """Where the scoring thread stands; read by the thread that waits."""

    current: int = 0
    rewards: list[float] = field(default_factory=list)


def score_batch(
    function: RewardFunction,
    items: Sequence[RewardItem],
    timeout_seconds: float,
    *,
    own_process: bool = False,
) -> list[float]:
    """Rewards of ``items``, in order, or an error.

    A Python thread cannot be stopped, so after a ``RewardTimeout`` the process is spoilt and
    must end. Code that hangs without letting other threads run (a regular expression that
    backtracks for ever) cannot even be seen to hang from inside Python; ``own_process`` covers
    it.

    Args:
        function: what ``resolve`` gave.
        timeout_seconds: deadline for the whole batch.
        own_process: this process exists for scoring alone: when the deadline passed
            10 seconds ago and nothing else could run, print the stack and exit with code 1.

    Raises:
        RewardError: the function raised or returned something else than a finite number.
        RewardTimeout: the deadline passed.
    """
    progress = _Progress()
    done: Future[None] = Future()
    thread = threading.Thread(
        target=_score_all, args=(function, items, progress, done), name="reward", daemon=True
    )
    if own_process:
        faulthandler.dump_traceback_later(timeout_seconds + _GRACE_SECONDS, exit=True)
    try:
        thread.start()
        done.result(timeout=timeout_seconds)
    except FutureTimeout as error:
        if done.done():  # the function itself raised a TimeoutError, wrapped already
            raise
        raise RewardTimeout(_late(function, items, progress, thread, timeout_seconds)) from error
    finally:
        if own_process:
            faulthandler.cancel_dump_traceback_later()
    return progress.rewards


def _score_all(
    function: RewardFunction,
    items: Sequence[RewardItem],
    progress: _Progress,
    done: Future[None],
) -> None:
    """Body of the scoring thread: fills ``progress``, hands every exception to ``done``."""
    try:
        for index, item in enumerate(items):
            progress.current = index
            progress.rewards.append(_score_one(function, item, index))
    except BaseException as error:  # noqa: BLE001 - re-raised by done.result() in the caller
        done.set_exception(error)
    else:
        done.set_result(None)


def _score_one(function: RewardFunction, item: RewardItem, index: int) -> float:
    try:
        value = function(item.prompt, item.response, item.answer, item.row)
    except Exception as error:
        raise RewardError(
            f"reward '{_name(function)}' raised {type(error).__name__}: {error}\n"
            f"on {_describe(item, index)}"
        ) from error
    if not isinstance(value, Real) or not math.isfinite(value):
        raise RewardError(
            f"reward '{_name(function)}' returned {value!r} ({type(value).__name__}), not a "
            f"finite number, on {_describe(item, index)}; return a float in every case"
        )
    return float(value)


def _late(
    function: RewardFunction,
    items: Sequence[RewardItem],
    progress: _Progress,
    thread: threading.Thread,
    timeout_seconds: float,
) -> str:
    """The message of a missed deadline: how far it came, and the line where it stands."""
    index = progress.current
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)[-2:]) if frame else "the thread has just ended\n"
    return (
        f"reward '{_name(function)}' did not score {len(items)} samples within "
        f"{timeout_seconds:g} s (`timeout_seconds`): {len(progress.rewards)} are done, "
        f"it is on {_describe(items[index], index)}\nat\n{stack}"
    )


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", repr(function))


def _describe(item: RewardItem, index: int) -> str:
    return (
        f"sample {index} (prompt {_excerpt(item.prompt)}, response {_excerpt(item.response)}, "
        f"answer {_excerpt(str(item.answer))})"
    )


def _excerpt(text: str) -> str:
    if len(text) > _EXCERPT_CHARACTERS:
        text = text[: _EXCERPT_CHARACTERS - 3] + "..."
    return repr(text)
