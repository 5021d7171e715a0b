"""The process in which rewards run: ``python -m hybridflow.rewards.child FD STACK_FD``.

Users' code may hang, exit, fork or hold the interpreter for ever; here it harms no one else. The
process ends itself when a sample's deadline passes, even while no Python code can run, and leaves
the stack at STACK_FD for the message.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.rewards.items import RewardItem
from hybridflow.rewards.resolve import Reward, resolve
from hybridflow.rewards.results import InvalidResult, as_list, checked, shown
from hybridflow.rewards.wire import Load, Work, read_body, send_body

_TEXT_CHARACTERS = 2_000


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


def main(connection: socket.socket, stack_fd: int) -> None:
    """Serve until the worker closes its side."""
    voice = _Voice(connection)
    first = read_body(connection)
    if first is None:
        return
    load: Load = pickle.loads(first)  # noqa: S301 - from the process that started this one
    try:
        reward = resolve(load.name, load.parameters, base=load.base)
    except ValueError as error:
        voice.say("fault", _cut(str(error)))
        return
    except BaseException as error:  # noqa: BLE001 - a user's constructor may raise anything
        voice.say("fault", f"reward '{load.name}' could not be made: {_raised_text(error)}")
        return
    voice.say("ready")
    with asyncio.Runner() as runner:
        while (body := read_body(connection)) is not None:
            work: Work = pickle.loads(body)  # noqa: S301 - see above
            if reward.is_async:
                runner.run(_score_async(reward, work, voice, stack_fd))
            else:
                _score_plain(reward, work, voice, stack_fd)
            voice.say("end")


def _chunks(reward: Reward, items: Sequence[RewardItem]) -> Iterator[list[int]]:
    for start in range(0, len(items), reward.batch):
        yield list(range(start, min(start + reward.batch, len(items))))


def _score_plain(reward: Reward, work: Work, voice: _Voice, stack_fd: int) -> None:
    for chunk in _chunks(reward, work.items):
        voice.say("start", chunk)
        faulthandler.dump_traceback_later(work.seconds, exit=True, file=stack_fd)
        items = [work.items[i] for i in chunk]
        try:
            result = reward.call(*reward.arguments(items))
        except BaseException as error:  # noqa: BLE001 - told to the worker
            result = _Raised(error)
        faulthandler.cancel_dump_traceback_later()
        _tell(reward, chunk, items, result, voice)


async def _score_async(reward: Reward, work: Work, voice: _Voice, stack_fd: int) -> None:
    chunks = _chunks(reward, work.items)

    async def line() -> None:
        for chunk in chunks:
            voice.say("start", chunk)
            items = [work.items[i] for i in chunk]
            call = asyncio.ensure_future(_guarded(reward, items))
            done, _ = await asyncio.wait({call}, timeout=work.seconds)
            if done:
                result = _Raised(asyncio.CancelledError()) if call.cancelled() else call.result()
                _tell(reward, chunk, items, result, voice)
                continue
            call.cancel()
            for index in chunk:
                voice.say("timeout", index, f"did not end within {work.seconds:g} s")

    heart = asyncio.ensure_future(_beat(work.seconds, stack_fd))
    await asyncio.gather(*[line() for _ in range(reward.calls_at_once)])
    heart.cancel()
    faulthandler.cancel_dump_traceback_later()


async def _guarded(reward: Reward, items: list[RewardItem]) -> Any:
    """The result, or what was raised: an exit in a task would end the loop."""
    try:
        return await reward.call(*reward.arguments(items))
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - told to the worker
        return _Raised(error)


async def _beat(seconds: float, stack_fd: int) -> None:
    """Ends the process when one call blocks all others for ``seconds``."""
    while True:
        faulthandler.dump_traceback_later(seconds, exit=True, file=stack_fd)
        await asyncio.sleep(min(1.0, seconds / 4))


def _tell(
    reward: Reward, chunk: list[int], items: list[RewardItem], result: Any, voice: _Voice
) -> None:
    if isinstance(result, _Raised):
        for index in chunk:
            voice.say("error", index, _raised_text(result.error))
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
        try:
            voice.say("done", index, checked(value, item))
        except InvalidResult as error:
            voice.say("invalid", index, str(error))


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
    return text if len(text) <= _TEXT_CHARACTERS else text[: _TEXT_CHARACTERS - 3] + "..."


if __name__ == "__main__":
    for number in sys.argv[1:]:
        os.set_inheritable(int(number), False)
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
