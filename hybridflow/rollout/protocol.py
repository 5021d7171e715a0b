"""What a rollout request and its answer hold. No torch, no HTTP."""

from __future__ import annotations

from dataclasses import dataclass

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
