"""Several rollout engines that answer as one.

Every request to an engine is open until it is answered, past its deadline, or withdrawn because
its engine was quarantined; whichever comes first closes it, and what comes later is dropped. So
each prompt is answered once, and never by an engine that is in doubt.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Generic, TypeVar

from hybridflow.batch import Batch
from hybridflow.rollout.calls import Call, OpenRequest
from hybridflow.rollout.engines import (
    Engine,
    EngineFailed,
    EngineFault,
    EngineState,
    FleetClosed,
    FleetError,
    FleetEvent,
    GenerateRequest,
    RequestRefused,
    fault_of,
)
from hybridflow.rollout.protocol import Sampling
from hybridflow.rollout.roster import Member, Roster
from hybridflow.rollout.routing import assign

AnyEngine = TypeVar("AnyEngine", bound=Engine)


class Fleet(Generic[AnyEngine]):
    """Engines behind one ``generate``. Threads may share it.

    Args:
        engines: each with a name of its own; all of them serve ``version``.
        repair: mends an engine and proves its weights; returns the version that it then serves.
            Runs on a thread of its own, and is left behind there past its deadline.
        request_seconds: deadline of a request, from when the engine is free for it.
        repair_seconds: deadline of a repair.
        on_event: is told what happens to engines, on any thread.
    """

    def __init__(
        self,
        engines: Sequence[AnyEngine],
        repair: Callable[[AnyEngine], int],
        *,
        request_seconds: float,
        repair_seconds: float,
        on_event: Callable[[FleetEvent], None],
        version: int = 0,
    ) -> None:
        self._roster = Roster(engines, repair, repair_seconds, on_event, self._withdraw_of, version)
        self._request_seconds = request_seconds
        self._open: dict[str, OpenRequest] = {}  # by the request's id; guarded by the roster's lock
        self._name = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._closed = False

    @property
    def version(self) -> int:
        """That all serving engines hold. An engine is re-admitted with this one alone."""
        return self._roster.version

    @version.setter
    def version(self, version: int) -> None:
        with self._roster.lock:
            self._roster.version = version

    @property
    def engines(self) -> list[AnyEngine]:
        """All engines, serving or not."""
        return [member.engine for member in self._roster.members.values()]

    def serving(self) -> list[AnyEngine]:
        """The engines that take requests."""
        return [member.engine for member in self._roster.serving()]

    def states(self) -> dict[str, EngineState]:
        """Every engine's state by its name."""
        with self._roster.lock:
            return {name: member.state for name, member in self._roster.members.items()}

    def open_requests(self) -> int:
        """How many requests to engines are neither answered nor withdrawn."""
        with self._roster.lock:
            return len(self._open)

    def quarantine(self, name: str, fault: EngineFault) -> None:
        """No request goes to the engine any more; its open ones are asked of others.

        Nothing changes for an engine that does not serve.
        """
        self._roster.quarantine(self._roster.members[name], fault)

    def repair(self) -> None:
        """Try once to bring every quarantined engine back, all at the same time.

        ``states`` tells what became of each; after ``MOST_REPAIRS`` failures in a row one is lost.
        """
        self._check_open()
        self._roster.repair()

    def require_engine(self) -> None:
        """At least one engine serves, after one repair of all where none did; or FleetError."""
        if not self._roster.serving():
            self.repair()
        self._none_left_is_an_error()

    def _none_left_is_an_error(self) -> None:
        if not self._roster.serving():
            raise FleetError(f"no rollout engine is left.\n{self._roster.account()}")

    def close(self) -> None:
        """Take no more requests; open ones raise ``FleetClosed``. Engines are left as they are."""
        with self._roster.lock:
            self._closed = True
            withdrawn, self._open = list(self._open.values()), {}
        for entry in withdrawn:
            entry.answer.set_exception(FleetClosed("the rollout fleet was closed"))

    def _check_open(self) -> None:
        if self._closed:
            raise FleetClosed("the rollout fleet is closed")

    def generate(self, batch: Batch, samples: int, sampling: Sampling) -> Batch:
        """``samples`` responses to each prompt of ``batch``, in the prompts' order.

        Raises:
            RequestRefused: an engine says that the request itself is wrong.
            FleetError: no engine is left, after one repair of all of them.
            FleetClosed: the fleet was closed.
        """
        call = Call(batch.select(["prompts"]), samples, sampling)
        missing: Sequence[int] | None = range(batch.prompts)
        waiting: list[OpenRequest] = []
        repaired = False
        try:
            while missing is not None or waiting:
                if missing is not None and (entries := self._send(call, missing)):
                    waiting += entries
                    missing = None
                elif missing is not None:
                    self._none_left_is_an_error() if repaired else self.require_engine()
                    repaired = True
                    continue
                for entry in self._closed_of(waiting):
                    waiting.remove(entry)
                    if not call.keep(entry):
                        missing = sorted([*(missing or ()), *entry.request.positions])
        finally:
            self._withdraw(waiting)
        return call.answer()

    def _send(self, call: Call, positions: Sequence[int]) -> list[OpenRequest]:
        """Ask serving engines for the prompts at ``positions``; nothing where none serves."""
        with self._roster.lock:
            self._check_open()
            members = self._roster.serving()
            entries = [
                self._enter(call, member, share)
                for member, share in self._shares(call, members, positions)
            ]
        for entry in entries:
            self._ask(entry)
        return entries

    def _shares(
        self, call: Call, members: list[Member[AnyEngine]], positions: Sequence[int]
    ) -> list[tuple[Member[AnyEngine], list[int]]]:
        """Each engine's positions; a call without prompts goes to the first one."""
        if not members or not positions:
            return [(member, []) for member in members[:1]]
        loads = [
            sum(entry.tokens for entry in self._open.values() if entry.member is member)
            for member in members
        ]
        tokens = [call.tokens(position) for position in positions]
        engine_of = assign([call.prompts[position] for position in positions], tokens, loads)
        shares: list[list[int]] = [[] for _ in members]
        for position, engine in zip(positions, engine_of, strict=True):
            shares[engine].append(position)
        return [(member, share) for member, share in zip(members, shares, strict=True) if share]

    def _enter(self, call: Call, member: Member[AnyEngine], share: Sequence[int]) -> OpenRequest:
        """Open a request; it is behind those that its engine has yet to answer."""
        member.busy_until = max(member.busy_until, time.monotonic()) + self._request_seconds
        request = call.request(f"{self._name}-{next(self._numbers)}", share)
        tokens = sum(call.tokens(position) for position in share)
        entry = OpenRequest(request, member, tokens, member.busy_until)
        self._open[request.id] = entry
        return entry

    def _ask(self, entry: OpenRequest) -> None:
        try:
            future = entry.member.engine.generate(entry.request)
        except Exception as error:  # noqa: BLE001 - the engine's failure, raised if none is left
            self._fail(entry, fault_of(error))
        else:
            future.add_done_callback(partial(self._answered, entry))

    def _answered(self, entry: OpenRequest, future: Future[Batch | EngineFault]) -> None:
        """Close the request with what its engine gave, unless it was closed before."""
        error = future.exception()
        outcome = fault_of(error) if error is not None else future.result()
        if isinstance(outcome, Batch):
            outcome = _short(entry.request, outcome) or outcome
        if isinstance(outcome, EngineFault) and not outcome.refused:
            self._fail(entry, outcome)
            return
        with self._roster.lock:
            if self._open.pop(entry.request.id, None) is None:
                return
        if isinstance(outcome, EngineFault):
            entry.answer.set_exception(RequestRefused(outcome.reason))
        else:
            entry.answer.set_result(outcome)

    def _fail(self, entry: OpenRequest, fault: EngineFault) -> None:
        """The engine failed at this request; once that is closed it says nothing any more."""
        with self._roster.lock:
            if entry.request.id in self._open:
                self._roster.quarantine(entry.member, fault)

    def _closed_of(self, waiting: list[OpenRequest]) -> list[OpenRequest]:
        """Those that are closed, once one is or a deadline has passed."""
        first = min(entry.deadline for entry in waiting)
        seconds = max(0.0, first - time.monotonic())
        wait([entry.answer for entry in waiting], seconds, FIRST_COMPLETED)
        for entry in waiting:
            if entry.deadline <= time.monotonic():
                prompts = len(entry.request.positions)
                late = f"no answer to {prompts} prompts within {self._request_seconds:g} s"
                self._fail(entry, EngineFault(late))
        return [entry for entry in waiting if entry.answer.done()]

    def _withdraw_of(self, member: Member[AnyEngine], fault: EngineFault) -> Callable[[], None]:
        """Close the member's requests; the result tells those who wait for them."""
        withdrawn = [entry for entry in self._open.values() if entry.member is member]
        self._withdraw(withdrawn)

        def tell() -> None:
            for entry in withdrawn:
                entry.answer.set_exception(EngineFailed(member.engine.name, fault))

        return tell

    def _withdraw(self, entries: Sequence[OpenRequest]) -> None:
        """Close requests that nobody waits for any more."""
        with self._roster.lock:
            for entry in entries:
                self._open.pop(entry.request.id, None)


def _short(request: GenerateRequest, answer: Batch) -> EngineFault | None:
    """The fault of an answer that does not have all samples."""
    got, asked = (answer.prompts, answer.samples_per_prompt), len(request.positions)
    if got == (asked, request.samples):
        return None
    return EngineFault(
        f"it answered {got[0]} x {got[1]} samples of {asked} prompts x {request.samples}"
    )
