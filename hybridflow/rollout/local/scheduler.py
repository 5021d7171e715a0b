"""The decode loop: one thread that owns the model, the cache and every row.

Other threads only hand it closures, which run between two steps. So weights change while nothing
is computed, and no state needs a lock.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from hybridflow.rollout.local.model import Decoder
from hybridflow.rollout.local.rows import Request, Row, RunningRows
from hybridflow.rollout.local.sampler import draw
from hybridflow.rollout.server_side import hybridflow_loader
from hybridflow.weight_sync.checksum import parameters_checksum

_PREFILL_TOKENS = 8192


class Refused(ValueError):
    """A request that the engine's state does not allow; the text says how to mend it."""


class Scheduler:
    """Continuous batching of up to `max_rows` rows. `run` is the thread's body."""

    def __init__(self, model: Decoder, max_rows: int, version: str) -> None:
        self.model, self.max_rows, self.version = model, max_rows, version
        self.paused = False
        self.updating = False
        self._running = RunningRows()
        self._waiting: deque[Row] = deque()
        self._cache = model.new_cache()
        self._commands: queue.SimpleQueue = queue.SimpleQueue()
        self._when_idle: deque[tuple[Callable[[], Any], Future]] = deque()

    # ---- called from other threads -------------------------------------------------------------

    def call(self, action: Callable[[], Any]) -> Future:
        """Run `action` between two steps."""
        future: Future = Future()
        self._commands.put((action, future))
        return future

    def submit(self, request: Request) -> Future:
        """Queue a request; its future gives the request when every row has finished."""
        self.call(lambda: self._enqueue(request))
        return request.future

    # ---- actions, run through `call` -----------------------------------------------------------

    def pause(self, mode: str) -> None:
        """`abort` ends every row, `retract` requeues the running ones, `in_place` freezes them."""
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            self._retract()
        self.paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self.paused = False

    def abort(self, rid: str | None) -> None:
        """End the rows of request `rid`, or all (None), with what they have."""
        chosen = [row for row in self._waiting if rid is None or row.request.rid == rid]
        self._waiting = deque(row for row in self._waiting if row not in chosen)
        running = self._running.rows
        indices = [i for i, row in enumerate(running) if rid is None or row.request.rid == rid]
        self._leave(dict.fromkeys(indices, {"type": "abort", "message": "aborted"}))
        for row in chosen:
            self._close(row, {"type": "abort", "message": "aborted"})

    def update(self, folder: str, version: str | None) -> Future | None:
        """Load weights in place. Running rows finish first, unless the engine is paused.

        Returns a future when the load has to wait, else None after loading.
        """
        return self._once_idle(lambda: self._load(folder, version))

    def begin_update(self) -> None:
        """Open a session for weights that come in parts; refused while one is open."""
        if self.updating:
            raise Refused("a weight-update session is already open; call end_weight_update() first")
        self.updating = True

    def end_update(self) -> None:
        """Close the session."""
        if not self.updating:
            raise Refused("no weight-update session is open; call begin_weight_update() first")
        self.updating = False

    def load_through(self, control: str, flush: bool = True) -> Future | None:
        """Have the loader do what `control` asks of the parameters; it writes its own status.

        Rows that are paused in place keep their cache without `flush`; with it they are a reason
        to refuse. Running rows finish first, unless the engine is paused; see `update` for what is
        returned.
        """
        if not self.updating:
            raise Refused("weights must come between begin_weight_update() and end_weight_update()")
        return self._once_idle(lambda: self._load_through(control, flush))

    def set_version(self, version: str) -> None:
        """Rename the weights; tokens made so far keep the old name."""
        for index, row in enumerate(self._running.rows):
            row.close_span(self.version, int(self._running.count_B[index]))
        for row in self._waiting:
            row.close_span(self.version, len(row.tokens))
        self.version = version

    def flush(self) -> None:
        """Give the cache's memory back; refused while rows run."""
        if len(self._running):
            raise Refused(f"{len(self._running)} rows are running. Pause with abort or retract.")
        self._cache.clear()

    def checksum(self) -> str:
        """The engine digest of the live parameters."""
        with torch.inference_mode():
            return parameters_checksum([self.model.parameters])

    # ---- the loop ------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Serve until `until()` holds, asked between steps; by default for ever."""
        with torch.inference_mode():
            while not until():
                self._run_commands()
                if not self.paused:
                    self._admit()
                    if len(self._running):
                        self._step()

    def _run_commands(self) -> None:
        """Run what was handed over; sleep while there is nothing to decode."""
        while self._idle() or not self._commands.empty():
            action, future = self._commands.get()
            _settle(action, future)
        while self._when_idle and not len(self._running):
            _settle(*self._when_idle.popleft())

    def _idle(self) -> bool:
        if self.paused:
            return True
        return not len(self._running) and not self._waiting and not self._when_idle

    def _enqueue(self, request: Request) -> None:
        request.open_rows = len(request.rows)
        self._waiting.extend(request.rows)

    def _once_idle(self, action: Callable[[], None]) -> Future | None:
        if self.paused or not len(self._running):
            action()
            return None
        future: Future = Future()
        self._when_idle.append((action, future))
        return future

    def _load(self, folder: str, version: str | None) -> None:
        self._refuse_frozen_rows()
        self.model.update(folder)
        if version is not None:
            self.set_version(version)

    def _load_through(self, control: str, flush: bool) -> None:
        if flush:
            self._refuse_frozen_rows()
        hybridflow_loader.serve(self.model.parameters, 0, control)
        self.model.bind()

    def _refuse_frozen_rows(self) -> None:
        if len(self._running):
            raise Refused(
                f"{len(self._running)} rows are paused in place and their cached keys belong to "
                "the present weights. Pause with retract or abort."
            )

    def _admit(self) -> None:
        """Prefill waiting rows while there is room. Rows of one prefix share one prefill."""
        room = self.max_rows - len(self._running)
        if self._when_idle or not self._waiting or room <= 0:
            return
        rows = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        groups: dict[tuple[int, ...], list[Row]] = {}
        for row in rows:
            groups.setdefault(row.prefix, []).append(row)
        longest = max(len(row.prompt) + row.max_tokens for row in rows)
        used = len(self._running)
        self._cache.reserve(used + len(rows), longest, used)
        for prefixes in _by_budget(sorted(groups, key=len)):
            self._prefill(prefixes, groups)
        self._leave(self._running.finished())

    def _prefill(self, prefixes: list[tuple[int, ...]], groups) -> None:
        lengths = torch.tensor([len(prefix) for prefix in prefixes])
        width = int(lengths.max())
        ids = torch.tensor([[*prefix] + [0] * (width - len(prefix)) for prefix in prefixes])
        logits, keys, values = self.model.prefill(ids, lengths)
        rows = [row for prefix in prefixes for row in groups[prefix]]
        repeats = torch.tensor([len(groups[prefix]) for prefix in prefixes])
        source = torch.arange(len(prefixes)).repeat_interleave(repeats)
        start = len(self._running)
        target = torch.arange(start, start + len(rows))
        self._cache.fill(target, keys[:, source], values[:, source])
        self._running.add(rows, self.model.geometry.vocab)
        self._draw(logits[source], start)

    def _step(self) -> None:
        state = self._running
        length = int(state.position_B.max()) + 1
        logits = self.model.decode(state.last_B, state.position_B, length, self._cache)
        self._draw(logits, 0)
        self._leave(state.finished())

    def _draw(self, logits: torch.Tensor, start: int) -> None:
        """Draw one token for the rows from `start` on, whose logits these are."""
        state = self._running
        token_B, logprob_B = draw(
            logits,
            state.uniform_B(start),
            state.temperature_B[start:],
            state.top_p_B[start:],
            state.top_k_B[start:],
        )
        state.record(token_B, logprob_B, start)

    def _leave(self, reasons: dict[int, dict]) -> None:
        """Finished rows leave the batch; rows from its end take their places."""
        if not reasons:
            return
        leaving = [(self._running.export(index), reason) for index, reason in reasons.items()]
        self._drop(sorted(reasons))
        for row, reason in leaving:
            self._close(row, reason)

    def _retract(self) -> None:
        """Put every running row back at the queue's head, its tokens kept."""
        rows = [self._running.export(index) for index in range(len(self._running))]
        self._drop(list(range(len(rows))))
        self._waiting.extendleft(reversed(rows))

    def _drop(self, indices: list[int]) -> None:
        length = int(self._running.position_B.max()) + 1 if len(self._running) else 0
        source, target = self._running.drop(indices)
        if len(source):
            self._cache.move(source, target, length)

    def _close(self, row: Row, reason: dict) -> None:
        row.close_span(self.version, len(row.tokens))
        row.finish = reason
        row.request.open_rows -= 1
        if row.request.open_rows == 0:
            row.request.future.set_result(row.request)


def _settle(action: Callable[[], Any], future: Future) -> None:
    """Run `action` and give its result, or its ValueError, to whoever waits. Others end the run."""
    try:
        result = action()
    except ValueError as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _by_budget(prefixes: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Cut prefixes, sorted by length, into runs of at most `_PREFILL_TOKENS` padded tokens."""
    runs: list[list[tuple[int, ...]]] = []
    for prefix in prefixes:
        if not runs or (len(runs[-1]) + 1) * len(prefix) > _PREFILL_TOKENS:
            runs.append([])
        runs[-1].append(prefix)
    return runs
