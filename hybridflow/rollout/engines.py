"""What a fleet asks of an engine, and what an engine may answer."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from hybridflow.batch import Batch
from hybridflow.rollout.protocol import Sampling


class EngineState(StrEnum):
    """Whether an engine takes requests.

    Only a ``SERVING`` one does. A ``QUARANTINED`` one failed and waits for its repair; a ``LOST``
    one failed its repairs as well and is left alone.
    """

    SERVING = "serving"
    QUARANTINED = "quarantined"
    REPAIRING = "repairing"
    LOST = "lost"


@dataclass(frozen=True)
class GenerateRequest:
    """What one engine is asked for.

    Attributes:
        id: of this request alone; asked again, the same prompts go under another.
        batch: the engine's share of the prompts, field ``prompts`` (token ids).
        positions: place of each prompt in the whole call. Seeds come from it, so that a sample
            draws the same numbers whichever engine answers.
        samples: responses to each prompt.
    """

    id: str
    batch: Batch
    positions: tuple[int, ...]
    samples: int
    sampling: Sampling


@dataclass(frozen=True)
class EngineFault:
    """Why an engine did not answer; ``log`` is the end of its server's log.

    ``refused``: the request is at fault, and every engine would refuse it.
    """

    reason: str
    log: str = ""
    refused: bool = False

    def __str__(self) -> str:
        return f"{self.reason}\n{self.log}".rstrip()


@dataclass(frozen=True)
class EngineHealth:
    """How a server fares; ``pid`` is its supervisor's, ``log`` the end of its log. ``version`` is
    None when it does not say."""

    url: str
    pid: int
    alive: bool
    healthy: bool
    version: str | None
    log: str


class Engine(Protocol):
    """One rollout engine. Its name is unique in the fleet."""

    @property
    def name(self) -> str: ...

    def generate(self, request: GenerateRequest) -> Future[Batch | EngineFault]:
        """Begins to answer. The engine has failed when the future raises or gives a fault."""
        ...


@dataclass(frozen=True)
class FleetEvent:
    """Something that happened to an engine: ``quarantine``, ``repair``, ``readmission``, ``lost``.

    ``log`` is the end of its server's log where that says more.
    """

    kind: str
    engine: str
    text: str
    log: str = ""


class EngineFailed(RuntimeError):
    """An engine did not do what it was asked to."""

    def __init__(self, engine: str, fault: EngineFault) -> None:
        super().__init__(f"{engine}: {fault}")
        self.engine, self.fault = engine, fault


class RequestRefused(ValueError):
    """An engine refused a request that every other would refuse as well."""


class FleetError(RuntimeError):
    """No engine is left that could answer; the text holds each engine's reason and log."""


class FleetClosed(RuntimeError):
    """The fleet was closed, before or while it answered."""


def fault_of(error: BaseException) -> EngineFault:
    """An exception's first line, and what it adds: the end of a log, say."""
    if isinstance(error, EngineFailed):
        return error.fault
    reason, _, more = str(error).partition("\n")
    return EngineFault(reason or type(error).__name__, more)
