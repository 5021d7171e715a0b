"""The process in which rewards run: ``python -m hybridflow.rewards.child FD STACK_FD``.

Users' code may hang, exit, fork or hold the interpreter for ever; here it harms no one else. The
worker sees in the ledger which calls are under way. It ends this process when one is late, even
while no Python code can run; the stack is left at STACK_FD for the message. Should the worker die
first, the process ends itself somewhat later.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import faulthandler
import json
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.rewards.deadline import set_deadline
from hybridflow.rewards.items import RewardItem
from hybridflow.rewards.ledger import Ledger
from hybridflow.rewards.output import printable
from hybridflow.rewards.resolve import Reward, resolve
from hybridflow.rewards.results import InvalidResult, as_list, checked, shown
from hybridflow.rewards.wire import (
    GRACE_SECONDS,
    STACK_SIGNAL,
    Load,
    Work,
    read_body,
    send_body,
)

_TEXT_CHARACTERS = 2_000
_ARM_SECONDS = 1.0
_UNCHANGING = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class _Raised:
    error: BaseException


class _Voice:
    """Tells the worker what happens; a fork of this process has none and ends."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pid = os.getpid()

    def say(self, *message: Any) -> None:
        if os.getpid() != self._pid:
            os._exit(0)
        send_body(self._connection, json.dumps(message).encode())


class _Fuse:
    """Ends the process when its worker cannot: long after a call's deadline, told by a thread that
    needs no interpreter. It is set anew once a second at most, since that starts a thread."""

    def __init__(self, seconds: float, stack_fd: int) -> None:
        self._seconds = seconds + _ARM_SECONDS + 2 * GRACE_SECONDS
        self._stack_fd = stack_fd
        self._armed = 0.0

    def arm(self, now: float) -> None:
        """From ``now`` on a call may be late."""
        if now - self._armed > _ARM_SECONDS:
            self._armed = now
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._stack_fd)


def main(connection: socket.socket, stack_fd: int) -> None:
    """Serve until the worker closes its side."""
    _be_the_first_to_go()
    voice = _Voice(connection)
    first = read_body(connection)
    if first is None:
        return
    load: Load = pickle.loads(first[0])  # noqa: S301 - from the process that started this one
    faulthandler.register(STACK_SIGNAL, file=stack_fd, all_threads=False, chain=True)
    try:
        reward = resolve(load.name, load.parameters, base=load.base, source=load.source)
    except ValueError as error:
        voice.say("fault", _cut(str(error)))
        return
    except BaseException as error:  # noqa: BLE001 - a user's constructor may raise anything
        voice.say("fault", f"reward '{load.name}' could not be made: {_raised_text(error)}")
        return
    voice.say("ready")
    with asyncio.Runner() as runner:
        while (received := read_body(connection)) is not None:
            body, memory = received
            assert memory is not None, "items come with a ledger"
            work: Work = pickle.loads(body)  # noqa: S301 - see above
            fuse = _Fuse(work.seconds, stack_fd)
            with Ledger(memory, work.items) as ledger:
                if reward.is_async:
                    runner.run(_score_async(reward, work, ledger, voice, fuse))
                else:
                    _score_plain(reward, work, ledger, voice, fuse)
            faulthandler.cancel_dump_traceback_later()
            _flush()
            voice.say("end")


def _flush() -> None:
    """What was printed is of this batch; and this process may be killed in the next one."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a user's code may have put anything in their place
            stream.flush()


def _be_the_first_to_go() -> None:
    """When the host's memory runs out, the kernel ends this process and what it starts, rather than
    one that trains."""
    with contextlib.suppress(OSError):  # a container may show /proc without letting it be written
        Path("/proc/self/oom_score_adj").write_text("1000")


def _chunks(reward: Reward, items: Sequence[RewardItem]) -> Iterator[list[int]]:
    for start in range(0, len(items), reward.batch):
        yield list(range(start, min(start + reward.batch, len(items))))


def _score_plain(reward: Reward, work: Work, ledger: Ledger, voice: _Voice, fuse: _Fuse) -> None:
    for chunk in _chunks(reward, work.items):
        fuse.arm(ledger.begin(chunk))
        items = [_own(work.items[i]) for i in chunk]
        try:
            result = reward.call(*reward.arguments(items))
        except BaseException as error:  # noqa: BLE001 - told to the worker
            result = _Raised(error)
        _tell(reward, chunk, items, result, ledger, voice)


async def _score_async(
    reward: Reward, work: Work, ledger: Ledger, voice: _Voice, fuse: _Fuse
) -> None:
    chunks = _chunks(reward, work.items)

    async def line() -> None:
        for chunk in chunks:
            ledger.begin(chunk)
            items = [_own(work.items[i]) for i in chunk]
            set_deadline(work.seconds)
            call = asyncio.ensure_future(_guarded(reward, items))
            done, _ = await asyncio.wait({call}, timeout=work.seconds)
            if done:
                result = _Raised(asyncio.CancelledError()) if call.cancelled() else call.result()
                _tell(reward, chunk, items, result, ledger, voice)
                continue
            call.cancel()
            for index in chunk:
                voice.say("timeout", index, f"did not end within {work.seconds:g} s")
                ledger.fail(index)

    heart = asyncio.ensure_future(_beat(work.seconds, ledger, fuse))
    await asyncio.sleep(0)  # the first beat comes before the first call
    await asyncio.gather(*[line() for _ in range(reward.calls_at_once)])
    heart.cancel()
    await asyncio.wait({heart})


async def _guarded(reward: Reward, items: list[RewardItem]) -> Any:
    """The result, or what was raised: an exit in a task would end the loop."""
    try:
        return await reward.call(*reward.arguments(items))
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - told to the worker
        return _Raised(error)


async def _beat(seconds: float, ledger: Ledger, fuse: _Fuse) -> None:
    """Shows that no call blocks the others."""
    while True:
        ledger.beat()
        fuse.arm(time.monotonic())
        await asyncio.sleep(min(1.0, seconds / 4))


def _tell(
    reward: Reward,
    chunk: list[int],
    items: list[RewardItem],
    result: Any,
    ledger: Ledger,
    voice: _Voice,
) -> None:
    if isinstance(result, _Raised):
        for index in chunk:
            voice.say(_kind(result.error), index, _raised_text(result.error))
            ledger.fail(index)
        return
    results: list[Any] | None = [result]
    if reward.takes_batch:
        results = as_list(result)
        if results is None or len(results) != len(items):
            got = shown(result) if results is None else f"{len(results)} results"
            voice.say("invalid", chunk[0], f"returned {got} for {len(items)} samples")
            return
    assert results is not None
    for index, item, value in zip(chunk, items, results, strict=True):
        if reward.takes_batch and isinstance(value, Exception):
            voice.say(_kind(value), index, _raised_text(value))
            ledger.fail(index)
            continue
        try:
            ledger.score(index, checked(value, item))
        except InvalidResult as error:
            voice.say("invalid", index, str(error))


def _own(item: RewardItem) -> RewardItem:
    """The item with a row of its own: samples of a prompt come with one, and a reward may write
    into it."""
    row = {key: _own_value(value) for key, value in item.row.items()}
    return RewardItem(item.prompt, item.response, _own_value(item.answer), row, item.tokens)


def _own_value(value: Any) -> Any:
    return value if type(value) in _UNCHANGING else copy.deepcopy(value)


def _kind(error: BaseException) -> str:
    """A function that says itself that it was late counts as one that was stopped."""
    return "timeout" if isinstance(error, TimeoutError) else "error"


def _raised_text(error: BaseException) -> str:
    """What was raised and where in the user's code."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - a user's __str__; the message must still be made
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"raised {_cut(text)}{where}"


def _cut(text: str) -> str:
    """At most so many characters, and those that would spoil a log spelled out."""
    return printable(
        text if len(text) <= _TEXT_CHARACTERS else text[: _TEXT_CHARACTERS - 3] + "..."
    )


if __name__ == "__main__":
    for number in sys.argv[1:]:
        os.set_inheritable(int(number), False)
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
