"""Requests, their rows, and the tensors that hold what every running row needs per step."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from hybridflow.rollout.local.sampler import uniforms


@dataclass(eq=False)
class Row:
    """One response being made. `tokens` and `logprobs` are filled when it leaves the batch."""

    request: Request = field(repr=False)
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    finish: dict | None = None

    @property
    def prefix(self) -> tuple[int, ...]:
        """What a prefill must run: the prompt, and what a requeued row has made already."""
        return (*self.prompt, *self.tokens)

    def close_span(self, version: str, count: int) -> None:
        """Tokens up to `count` that no span covers were made by `version`."""
        start = self.spans[-1][2] if self.spans else 0
        if count > start:
            self.spans.append((version, start, count))


@dataclass(eq=False)
class Request:
    """A /generate call: its rows in order, and the future its handler waits on."""

    rid: str
    rows: list[Row] = field(default_factory=list)
    future: Future = field(default_factory=Future)
    open_rows: int = 0


class RunningRows:
    """Per-row state as tensors over the batch, [B] or [B, N] with N the largest max_tokens.

    Row i of every tensor, `rows[i]`, and row i of the KV cache are the same row.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.last_B = self.position_B = self.count_B = self.limit_B = torch.empty(0).long()
        self.top_k_B = self.last_B
        self.temperature_B = self.top_p_B = torch.empty(0)
        self.tokens_BN, self.logprobs_BN = torch.empty(0, 0).long(), torch.empty(0, 0)
        self.uniform_BN = torch.empty(0, 0)
        self._stop_BV: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rows: list[Row], vocab: int) -> None:
        """Append rows whose prefix is in the cache; their next token comes from `record`."""
        width = max([row.max_tokens for row in rows] + [self.tokens_BN.shape[1]])
        self._widen(width)
        fresh = len(rows)
        self._cat("last_B", torch.zeros(fresh).long())
        self._cat("position_B", torch.tensor([len(row.prefix) - 1 for row in rows]))
        self._cat("count_B", torch.tensor([len(row.tokens) for row in rows]))
        self._cat("limit_B", torch.tensor([row.max_tokens for row in rows]))
        self._cat("temperature_B", torch.tensor([row.temperature for row in rows]))
        self._cat("top_p_B", torch.tensor([row.top_p for row in rows]))
        top_k = [vocab if row.top_k < 0 else min(row.top_k, vocab) for row in rows]
        self._cat("top_k_B", torch.tensor(top_k))
        self._cat("tokens_BN", _padded([row.tokens for row in rows], width).long())
        self._cat("logprobs_BN", _padded([row.logprobs for row in rows], width))
        noise = torch.zeros(fresh, width)
        for index, row in enumerate(rows):
            if row.temperature:
                noise[index, : row.max_tokens] = uniforms(row.seed, row.max_tokens)
        self._cat("uniform_BN", noise)
        self.rows.extend(rows)
        self._stop_BV = None

    def uniform_B(self, start: int = 0) -> torch.Tensor:
        """Each row's uniform number for its next token, rows from `start` on."""
        rows_B = torch.arange(start, len(self.rows))
        return self.uniform_BN[rows_B, self.count_B[start:]]

    def record(self, token_B: torch.Tensor, logprob_B: torch.Tensor, start: int = 0) -> None:
        """Append one token to every row from `start` on."""
        rows_B = torch.arange(start, len(self.rows))
        self.tokens_BN[rows_B, self.count_B[start:]] = token_B
        self.logprobs_BN[rows_B, self.count_B[start:]] = logprob_B
        self.last_B[start:] = token_B
        self.position_B[start:] += 1
        self.count_B[start:] += 1

    def finished(self) -> dict[int, dict]:
        """Row number -> finish reason, of rows that just ended by a stop id or by length."""
        stopped_B, full_B = self._stopped(), self.count_B >= self.limit_B
        reasons = {}
        for row in (stopped_B | full_B).nonzero().squeeze(1).tolist():
            if bool(stopped_B[row]):
                reasons[row] = {"type": "stop", "matched": int(self.last_B[row])}
            else:
                reasons[row] = {"type": "length", "length": int(self.limit_B[row])}
        return reasons

    def export(self, index: int) -> Row:
        """Copy a row's tokens and log-probabilities out of the tensors into the Row."""
        row, count = self.rows[index], int(self.count_B[index])
        row.tokens = self.tokens_BN[index, :count].tolist()
        row.logprobs = self.logprobs_BN[index, :count].tolist()
        return row

    def drop(self, leaving: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Remove rows; returns (source, target): rows from the end that filled the gaps."""
        keep = len(self.rows) - len(leaving)
        gone = set(leaving)
        targets = [row for row in leaving if row < keep]
        sources = [row for row in range(keep, len(self.rows)) if row not in gone]
        order = list(range(keep))
        for source, target in zip(sources, targets, strict=True):
            order[target] = source
        index = torch.tensor(order, dtype=torch.long)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value[index])
        self.rows = [self.rows[row] for row in order]
        self._stop_BV = None
        return torch.tensor(sources, dtype=torch.long), torch.tensor(targets, dtype=torch.long)

    def _stopped(self) -> torch.Tensor:
        if self._stop_BV is None:
            widest = max((len(row.stop_ids) for row in self.rows), default=0)
            stops = [[*row.stop_ids] + [-1] * (widest - len(row.stop_ids)) for row in self.rows]
            self._stop_BV = torch.tensor(stops, dtype=torch.long).view(len(self.rows), widest)
        return (self._stop_BV == self.last_B[:, None]).any(-1)

    def _cat(self, name: str, fresh: torch.Tensor) -> None:
        setattr(self, name, torch.cat([getattr(self, name), fresh]))

    def _widen(self, width: int) -> None:
        for name in ("tokens_BN", "logprobs_BN", "uniform_BN"):
            old = getattr(self, name)
            setattr(self, name, torch.nn.functional.pad(old, (0, width - old.shape[1])))


def _padded(rows: list[list], width: int) -> torch.Tensor:
    return torch.tensor([[*row] + [0] * (width - len(row)) for row in rows]).view(len(rows), width)
