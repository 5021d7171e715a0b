"""Publishing a version to a fleet in two phases, driven from one place.

Either the bytes arrive beside the servers while these go on (*overlapping* transports), are proven
there, and are then loaded; or the servers are paused first and take the bytes as they come. In both
no engine serves before it has proven the version, and none goes on while another is still to be
proven: all that stay in service hold the new version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybridflow.weight_sync.inbox import Fault, PhaseReport

_ABANDONED_SECONDS = 30.0
"""How long engines may take to notice that the trainer is gone, before that is told."""
Send = Callable[[Mapping[int, Any], int], Any]
"""Endpoints by engine and the version to what the trainer's ranks say they sent, by rank."""


class EngineLink(Protocol):
    """One engine, as the driver reaches it. A phase's future never raises."""

    engine: int

    def phase(self, name: str, version: int, *args: Any) -> Future[PhaseReport]:
        """Start a phase (a method of ``EngineSide``)."""
        ...


@dataclass(frozen=True)
class PublishReport:
    """What one publication did.

    Attributes:
        version: that is served now.
        bytes: that reached all engines.
        seconds: by step, of the slowest engine; ``send`` is the trainer's; ``paused`` is how long
            servers stood still.
        checksums: digest of the live parameters by engine.
        mended: engines that needed a second try, with the reason of the first.
        failed: engines that hold no proven version, with the reason.
        behind: engines that still hold the version before, untouched, with the reason.
    """

    version: int
    bytes: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    checksums: Mapping[int, str] = field(default_factory=dict)
    mended: Mapping[int, Fault] = field(default_factory=dict)
    failed: Mapping[int, Fault] = field(default_factory=dict)
    behind: Mapping[int, Fault] = field(default_factory=dict)


def publish_to(
    links: Sequence[EngineLink], send: Send, version: int, *, overlaps: bool, loads: bool = True
) -> PublishReport:
    """Bring ``version`` to every engine.

    Args:
        links: the engines to bring it to.
        send: lets the trainer's ranks send; its exceptions end the publication.
        overlaps: whether bytes arrive while servers go on.
        loads: False where servers hold these weights already, and have but to be proven
            (overlapping transports alone).
    """
    assert loads or overlaps, "what is not loaded must have arrived beside the server"
    attempt = _Attempt(version, links)
    attempt.run(send, overlaps, loads)
    mended: dict[int, Fault] = {}
    if attempt.faults and loads:
        mended = _mend(attempt, send, overlaps)
    if loads:
        attempt.each("resume", attempt.proven)
    if attempt.paused_at is not None:
        attempt.seconds["paused"] = time.perf_counter() - attempt.paused_at
    return PublishReport(
        version,
        sum(attempt.bytes.values()),
        attempt.seconds,
        attempt.checksums,
        mended,
        {e: fault for e, fault in attempt.faults.items() if e in attempt.touched},
        {e: fault for e, fault in attempt.faults.items() if e not in attempt.touched},
    )


def _mend(attempt: _Attempt, send: Send, overlaps: bool) -> dict[int, Fault]:
    """A second try for the engines that failed; their first reasons where it helped."""
    first = dict(attempt.faults)
    links = [link for link in attempt.links if link.engine in first]
    if overlaps:
        # What was proven beside the server is pushed again, to a new server where it died.
        held = [link for link in links if link.engine in attempt.arrived]
        attempt.faults = {e: fault for e, fault in first.items() if e not in attempt.arrived}
        attempt.restore(held)
        links = [link for link in links if link.engine not in attempt.arrived]
    if links:
        again = _Attempt(attempt.version, links)
        again.run(send, overlaps)
        attempt.take(again)
    for engine, fault in list(attempt.faults.items()):
        cause = first[engine]
        if fault is not cause:
            told = f"{fault.reason} (the second try; the first: {cause.reason})"
            attempt.faults[engine] = Fault(told, fault.log or cause.log)
    return {engine: fault for engine, fault in first.items() if engine not in attempt.faults}


class _Attempt:
    """One pass of a version over some engines; an engine drops out at its first failure."""

    def __init__(self, version: int, links: Sequence[EngineLink]) -> None:
        self.version, self.links = version, list(links)
        self.faults: dict[int, Fault] = {}
        self.arrived: set[int] = set()
        self.touched: set[int] = set()
        self.proven: list[EngineLink] = []
        self.bytes: dict[int, int] = {}
        self.checksums: dict[int, str] = {}
        self.seconds: dict[str, float] = {}
        self.paused_at: float | None = None
        self._results: dict[int, Any] = {}

    def run(self, send: Send, overlaps: bool, loads: bool = True) -> None:
        """Both phases, up to servers that are paused (if they load) and proven."""
        opened = self.each("open", self.links)
        if not opened:
            return
        endpoints = {link.engine: self._results[link.engine] for link in opened}
        if overlaps:
            receiving = self._start("receive", opened)
            proofs = self._send(send, endpoints)
            came = self.each("prove", self._finish(receiving), proofs)
            self.arrived |= {link.engine for link in came}
            loaded = self._finish(self._load(came)) if loads else came
        else:
            loading = self._load(opened)
            try:
                proofs = self._send(send, endpoints)
            except BaseException:
                # Loaders see that their senders ended. One that was still at it could break in on
                # a later publication.
                wait([future for _, future in loading], _ABANDONED_SECONDS)
                raise
            loaded = self._finish(loading)
        self.proven = self.each("confirm", loaded, proofs)
        self.checksums = {link.engine: self._results[link.engine] for link in self.proven}

    def restore(self, links: Sequence[EngineLink]) -> None:
        """Bring engines to what was proven beside them."""
        restored = self.each("restore", links)
        self.proven += restored
        self.checksums |= {link.engine: self._results[link.engine] for link in restored}

    def take(self, other: _Attempt) -> None:
        """Add what a further pass over some of the engines brought."""
        self.proven += other.proven
        self.faults = {
            e: fault for e, fault in self.faults.items() if e not in {k.engine for k in other.links}
        } | other.faults
        self.touched |= other.touched
        self.bytes |= other.bytes
        self.checksums |= other.checksums

    def each(self, phase: str, links: Sequence[EngineLink], *args: Any) -> list[EngineLink]:
        """Run a phase on engines at once; those that did it."""
        return self._finish(self._start(phase, links, *args))

    def _load(self, links: Sequence[EngineLink]) -> list[tuple[EngineLink, Future[PhaseReport]]]:
        self.touched |= {link.engine for link in links}
        self.paused_at = time.perf_counter()
        return self._start("load", links)

    def _send(self, send: Send, endpoints: Mapping[int, Any]) -> Any:
        start = time.perf_counter()
        proofs = send(endpoints, self.version)
        self.seconds["send"] = time.perf_counter() - start
        return proofs

    def _start(
        self, phase: str, links: Sequence[EngineLink], *args: Any
    ) -> list[tuple[EngineLink, Future[PhaseReport]]]:
        return [(link, link.phase(phase, self.version, *args)) for link in links]

    def _finish(
        self, running: Sequence[tuple[EngineLink, Future[PhaseReport]]]
    ) -> list[EngineLink]:
        done = []
        for link, future in running:
            report = future.result()
            self.bytes[link.engine] = max(report.bytes, self.bytes.get(link.engine, 0))
            for step, seconds in report.seconds.items():
                self.seconds[step] = max(seconds, self.seconds.get(step, 0.0))
            if report.fault is None:
                self._results[link.engine] = report.result
                done.append(link)
            else:
                self.faults[link.engine] = report.fault
        return done
