"""The engine's side of a publication: phases that end in a report, never in an exception.

An engine that fails a phase is one of many: its fault travels to the driver, which quarantines or
repairs it while the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class WeightMismatch(RuntimeError):
    """An engine holds other weights than the trainer sent; the version is not served."""


class SendFailed(RuntimeError):
    """Trainer ranks did not send all; what an engine holds of the version is worth nothing."""


@dataclass(frozen=True)
class Fault:
    """Why a phase failed; ``log`` is the end of the server's log where that says more."""

    reason: str
    log: str = ""

    def __str__(self) -> str:
        return f"{self.reason}\n{self.log}".rstrip()


@dataclass(frozen=True)
class PhaseReport:
    """How one engine's phase ended.

    Attributes:
        engine: its number.
        version: that was published.
        fault: why it failed; None: it did not.
        bytes: that reached the engine in this phase.
        seconds: by step.
        result: what the phase gives (an endpoint, a digest).
    """

    engine: int
    version: int
    fault: Fault | None = None
    bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    result: Any = None


class Server(Protocol):
    """What a publication asks of a rollout server's client."""

    url: str

    def pause(self, mode: str = ...) -> None: ...
    def set_version(self, version: int) -> None: ...
    def continue_(self) -> None: ...


class Inbox(Protocol):
    """How a transport's bytes reach one engine. Every method may raise; each has a deadline.

    Attributes:
        bytes: that reached this engine since ``open``.
    """

    bytes: int

    def open(self, version: int) -> Any:
        """Make ready for a version; the endpoint that the trainer's ranks send to."""
        ...

    def receive(self, version: int) -> None:
        """Take in what does not come by itself, while the server goes on."""
        ...

    def prove(self, version: int, proofs: Any) -> None:
        """Compare what has come with what the trainer's ranks say they sent."""
        ...

    def load(self, client: Any, version: int) -> None:
        """Put the weights into the paused server."""
        ...

    def give_up(self, version: int, why: str) -> None:
        """Nobody will load what was opened: let senders go that would wait for it."""
        ...

    def check(self, client: Any, version: int, proofs: Any) -> str:
        """The digest of the server's live parameters, after comparing it with what was sent."""
        ...

    def digest(self, client: Any) -> str:
        """The digest of the server's live parameters."""
        ...

    def restore(self, client: Any, version: int) -> str:
        """Bring a paused server whose weights are in doubt, or that was started anew, to a proven
        ``version``, without the trainer; its digest. ValueError: this inbox no longer holds it."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


PHASES = ("digest", "open", "receive", "prove", "load", "confirm", "resume", "restore")


class EngineSide:
    """The phases of a publication at one engine.

    ``client`` gives the client of the running server (another one after a restart). After ``load``
    the server is paused until ``resume``; it takes the version's name only in ``confirm``.
    """

    def __init__(
        self, engine: int, inbox: Inbox, client: Callable[[], Server], pause: str = "retract"
    ) -> None:
        self.engine, self._inbox, self._client = engine, inbox, client
        self._pause = pause

    def digest(self, version: int) -> PhaseReport:
        """``result``: the digest of the server's live parameters."""
        return self._run(version, ("digest", lambda: self._inbox.digest(self._client())))

    def open(self, version: int) -> PhaseReport:
        """``result``: the endpoint."""
        return self._run(version, ("open", lambda: self._inbox.open(version)))

    def receive(self, version: int) -> PhaseReport:
        """Take in what other hosts send."""
        return self._run(version, ("receive", lambda: self._inbox.receive(version)))

    def prove(self, version: int, proofs: Any) -> PhaseReport:
        """Prove the bytes before they touch the server."""
        return self._run(version, ("prove", lambda: self._inbox.prove(version, proofs)))

    def load(self, version: int) -> PhaseReport:
        """Pause the server and give it the weights."""
        return self._run(
            version,
            ("pause", lambda: self._stand_still(version)),
            ("load", lambda: self._inbox.load(self._client(), version)),
        )

    def confirm(self, version: int, proofs: Any) -> PhaseReport:
        """Prove the server's live parameters and give them their name; ``result``: the digest."""
        return self._run(
            version,
            ("verify", lambda: self._inbox.check(self._client(), version, proofs)),
            ("activate", lambda: self._client().set_version(version)),
        )

    def resume(self, version: int) -> PhaseReport:
        """Serve again."""
        return self._run(version, ("continue", lambda: self._client().continue_()))

    def restore(self, version: int) -> PhaseReport:
        """Bring the server, old or new, to a proven version that the inbox still holds; ``result``:
        the digest."""
        return self._run(
            version,
            ("pause", lambda: self._client().pause("abort")),
            ("restore", lambda: self._inbox.restore(self._client(), version)),
            ("activate", lambda: self._client().set_version(version)),
        )

    def close(self) -> None:
        """Give everything back."""
        self._inbox.close()

    def _stand_still(self, version: int) -> None:
        """Pause the server; where it cannot be, nobody waits for it to take its weights."""
        try:
            self._client().pause(self._pause)
        except Exception as error:
            try:
                self._inbox.give_up(version, str(error))
            except Exception as second:  # noqa: BLE001 - the first one is the cause
                error.add_note(f"nor were its senders told: {second}")
            raise

    def _run(self, version: int, *steps: tuple[str, Callable[[], Any]]) -> PhaseReport:
        """The steps in order, up to the first that fails; its exception is the fault."""
        seconds: dict[str, float] = {}
        result, fault = None, None
        for name, act in steps:
            start = time.perf_counter()
            try:
                given = act()
                result = result if given is None else given
            except Exception as error:  # noqa: BLE001 - the report carries it to the driver
                fault = Fault(f"{name}: {type(error).__name__}: {error}")
            seconds[name] = time.perf_counter() - start
            if fault is not None:
                break
        return PhaseReport(self.engine, version, fault, self._inbox.bytes, seconds, result)
