"""What a rollout request and its answer hold. No torch, no HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GREEDY = 0.0


@dataclass(frozen=True)
class Sampling:
    """How to sample. `temperature` 0 is greedy; `top_k` -1 keeps the whole vocabulary.

    `max_tokens` counts response tokens. With a `seed`, the local engine repeats a request bit for
    bit when nothing else runs beside it; SGLang heeds seeds only under its deterministic mode.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        faults = []
        if self.max_tokens < 1:
            faults.append(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not self.temperature >= 0:
            faults.append(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            faults.append(f"top_p is {self.top_p}; it must be in (0, 1]")
        if self.top_k < 1 and self.top_k != -1:
            faults.append(f"top_k is {self.top_k}; it must be -1 (all) or at least 1")
        if faults:
            raise ValueError("sampling: " + "; ".join(faults) + ".")


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens [start, end) were sampled from weights `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """One response.

    `logprobs` are of the temperature-scaled distribution over the whole vocabulary, before top-p
    and top-k cut it (greedy: temperature 1). `finish_reason` is "stop", "length" or "abort".
    A stop token is the last of `tokens`.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    weight_version: str
    spans: tuple[VersionSpan, ...]


@dataclass(frozen=True)
class LoaderStatus:
    """What the loader inside a server says of one rank's request.

    `touched`: its parameters may have changed. `bytes` were copied; `seconds` by phase;
    `resident_bytes` and `peak_resident_bytes` are of the server's process afterwards. `digests` of
    live parameters (operation "digest") and `parameters` as (name, dtype, shape) (operation
    "names") are empty for other operations.
    """

    nonce: str
    rank: int
    pid: int
    ok: bool
    touched: bool
    error: str
    bytes: int
    seconds: Mapping[str, float]
    resident_bytes: int
    peak_resident_bytes: int
    digests: Mapping[str, str]
    parameters: tuple[tuple[str, str, tuple[int, ...]], ...]

    @classmethod
    def from_json(cls, text: Mapping[str, Any]) -> LoaderStatus:
        """Of a status file's content."""
        return cls(
            nonce=text["nonce"],
            rank=text["rank"],
            pid=text["pid"],
            ok=text["ok"],
            touched=text["touched"],
            error=text.get("error", ""),
            bytes=text["bytes"],
            seconds=text["seconds"],
            resident_bytes=text["rss"]["now"],
            peak_resident_bytes=text["rss"]["peak"],
            digests=text.get("digests", {}),
            parameters=tuple(
                (name, dtype, tuple(shape)) for name, dtype, shape in text.get("parameters", [])
            ),
        )
