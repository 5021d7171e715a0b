"""A process that scores responses with the functions of its role."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.cluster.transfer import DATA_PARALLEL, GATHER, ONE_TO_ALL, transfer
from hybridflow.data import load_tokenizer
from hybridflow.recipe.axes import Axis
from hybridflow.rewards import (
    Failure,
    FunctionSettings,
    Level,
    Outcome,
    RewardError,
    RewardItem,
    Scorer,
    complaint,
    settle,
)

COMPONENT, FAILED = "component", "failed"
"""Fields ``component:NAME`` (samples, float32: the value of one of several functions) and
``failed:NAME`` (samples, int8) beside the rewards."""

ERROR, TIMEOUT = 1, 2
"""Values of ``failed:NAME``; 0: scored."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Scored:
    """What became of a batch.

    Attributes:
        failed: samples without a score of some function.
        failures: of each function that failed, what to tell.
        first_failure: the first sample without a score and why; empty: there is none.
    """

    result: Batch
    failed: int
    failures: list[str]
    first_failure: str


class RewardWorker:
    """Holds the tokenizer and a scorer of each function; each call scores its share of a batch.

    Args:
        functions: whose weighted sum is the reward.
        level: one value for each response, or one for each of its tokens.
        seconds_per_step, seconds_per_call, start_seconds: deadlines of one ``score``, of each call
            of a function, and of loading one.
        memory_gib: most that each function's process may hold.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        rendezvous: tuple[str, int],
        *,
        model_path: str,
        functions: Sequence[FunctionSettings],
        level: Level,
        seconds_per_step: float,
        seconds_per_call: float,
        start_seconds: float,
        memory_gib: float,
    ) -> None:
        self._level: Level = level
        self._seconds_per_step = seconds_per_step
        self._seconds_per_call = seconds_per_call
        self._start_seconds = start_seconds
        self._memory_gib = memory_gib
        self._functions = list(functions)
        self._scorers = [self._scorer(function) for function in functions]  # load beside each other
        self._first_failure = ""
        self._last: tuple[Batch, list[RewardItem]] | None = None
        self._next: tuple[list[FunctionSettings], list[Scorer]] | None = None
        self._threads = ThreadPoolExecutor(len(self._scorers), thread_name_prefix="reward")
        try:
            self._tokenizer = load_tokenizer(model_path)
            for scorer in self._scorers:
                scorer.wait_until_ready()
        except BaseException:
            self.close()
            raise
        added = self._tokenizer.added_tokens_decoder.items()
        special = {i for i, token in added if token.special} | {*self._tokenizer.all_special_ids}
        self._special_ids = torch.tensor(sorted(special), dtype=torch.int64)

    def _scorer(self, function: FunctionSettings) -> Scorer:
        return Scorer(
            function.function,
            function.parameters,
            seconds_per_call=self._seconds_per_call,
            start_seconds=self._start_seconds,
            memory_gib=self._memory_gib,
            source=function.source,
        )

    @transfer(DATA_PARALLEL)
    def score(self, batch: Batch) -> Batch:
        """rewards (samples, float32) of prompts, answers and responses; at level ``token`` also
        token_rewards (tokens, float32), whose sum they are."""
        self._last = batch, self._items(batch)
        scored = self._scored(self._functions, self._scorers)
        self._first_failure = scored.first_failure
        for text in scored.failures:
            _log.warning("%s", text)
        return scored.result

    def _scored(self, functions: Sequence[FunctionSettings], scorers: Sequence[Scorer]) -> _Scored:
        """What functions give for the last batch."""
        assert self._last is not None, "there is a batch"
        batch, items = self._last
        jobs = [self._threads.submit(s.score, items, self._seconds_per_step) for s in scorers]
        pairs = list(zip(functions, [job.result() for job in jobs], strict=True))
        values = [settle(f, items, found, batch.samples_per_prompt) for f, found in pairs]
        fields: dict[str, tuple[Axis, Any]] = {}
        if self._level == "token":
            parts = [self._on_tokens(batch["responses"], part) for part in values]
            total = _weighted(functions, parts)
            fields["token_rewards"] = Axis.TOKENS, batch["responses"].with_values(total)
            owner = _owners(batch["responses"])
            zero = torch.zeros(batch.samples)
            parts = [zero.index_add(0, owner, part) for part in parts]
            rewards = zero.index_add(0, owner, total)
        else:
            parts = [torch.tensor(part, dtype=torch.float32) for part in values]
            rewards = _weighted(functions, parts)
        for function, part in zip(functions, parts, strict=True):
            _require_finite(function.function, part, items)
        terms = " + ".join(f"{f.weight:g} * {f.name}" for f in functions)
        _require_finite(terms, rewards, items)
        fields["rewards"] = Axis.SAMPLES, rewards
        for (function, found), part in zip(pairs, parts, strict=True):
            if len(pairs) > 1:
                fields[f"{COMPONENT}:{function.name}"] = Axis.SAMPLES, part
            if function.on_error != "fail":
                fields[f"{FAILED}:{function.name}"] = Axis.SAMPLES, _failures(found)
        result = Batch(
            {name: data for name, (_, data) in fields.items()},
            {name: axis for name, (axis, _) in fields.items()},
            batch.prompts,
            batch.samples_per_prompt,
        )
        return _Scored(result, *_failed(pairs, items))

    def _items(self, batch: Batch) -> list[RewardItem]:
        groups = batch.samples_per_prompt
        rows = [row.tolist() for row in batch["responses"].rows()]
        texts = self._tokenizer.batch_decode(rows, skip_special_tokens=True)
        items = [_item(batch["answers"][i // groups], text) for i, text in enumerate(texts)]
        if self._level == "sequence":
            return items
        special = set(self._special_ids.tolist())
        kept = [[i for i in row if i not in special] for row in rows]
        pieces = [self._tokenizer.batch_decode([[i] for i in row]) for row in kept]
        return [replace(i, tokens=tuple(p)) for i, p in zip(items, pieces, strict=True)]

    def _on_tokens(self, responses: Ragged, values: Sequence[Any]) -> Tensor:
        """Values of the plain tokens on all tokens, ``[sum of lengths]``: special ones, such as the
        end of the sequence, are 0."""
        plain_T = ~torch.isin(responses.values, self._special_ids)
        values_T = torch.zeros(len(plain_T))
        values_T[plain_T] = torch.tensor([v for row in values for v in row], dtype=torch.float32)
        return values_T

    @transfer(GATHER)
    def first_failure(self) -> str:
        """The first sample without a score of the last ``score`` and why; empty: there is none."""
        return self._first_failure

    @transfer(GATHER)
    def prepare(self, functions: Sequence[FunctionSettings], failed_share: float) -> str | None:
        """Load functions beside those in service, and have them score the last batch within its
        time, as they will the next; why they cannot be used, or None. ``swap`` ends either.

        Args:
            failed_share: most of the samples that may have no score.
        """
        scorers: list[Scorer] = []
        self._next = [*functions], scorers
        try:
            for function in functions:
                scorers.append(self._scorer(function))  # noqa: PERF401 - each is there to be closed
            for scorer in scorers:
                scorer.wait_until_ready()
            if self._last is not None:
                scored = self._scored(functions, scorers)
                count, samples = scored.failed, scored.result.samples
                if count > failed_share * samples:
                    where = f"{count} of {samples} samples of the last step have no score"
                    return f"{where}; {scored.first_failure}"
        except (ValueError, OSError, RewardError) as error:
            return str(error)
        return None

    @transfer(ONE_TO_ALL)
    def swap(self, accept: bool) -> None:
        """Put what ``prepare`` loaded in service, or throw it away."""
        assert self._next is not None, "prepare comes before swap"
        functions, scorers = self._next
        self._next = None
        if accept:
            self._functions, self._scorers, scorers = functions, scorers, self._scorers
        for scorer in scorers:
            scorer.close()

    def close(self) -> None:
        """End the scoring processes."""
        for scorer in (*self._scorers, *(self._next[1] if self._next else ())):
            scorer.close()
        self._threads.shutdown(wait=False)


def _item(answer: dict[str, Any], response: str) -> RewardItem:
    return RewardItem(answer["prompt_text"], response, answer["answer"], answer)


def _failed(
    pairs: Sequence[tuple[FunctionSettings, list[Outcome]]], items: Sequence[RewardItem]
) -> tuple[int, list[str], str]:
    """How many samples have no score, what to tell of each function, and of the first sample."""
    samples: set[int] = set()
    told: list[tuple[str, str]] = []
    for function, outcomes in pairs:
        failed = {i: o.text for i, o in enumerate(outcomes) if isinstance(o, Failure)}
        if failed:
            index, text = next(iter(failed.items()))
            first = complaint(function.function, items[index], index, text)
            told.append((first, f"{len(failed)} of {len(outcomes)} samples have no score; {first}"))
        samples |= failed.keys()
    return len(samples), [text for _, text in told], told[0][0] if told else ""


def _weighted(functions: Sequence[FunctionSettings], parts: Sequence[Tensor]) -> Tensor:
    """The sum of the functions' values, weighted, in float32."""
    pairs = zip(functions, parts, strict=True)
    total = sum(function.weight * part.double() for function, part in pairs)
    assert isinstance(total, Tensor)
    return total.float()


def _owners(responses: Ragged) -> Tensor:
    """The sample of every token, ``[sum of lengths]``."""
    return torch.arange(len(responses)).repeat_interleave(responses.lengths)


def _require_finite(name: str, sums_S: Tensor, items: Sequence[RewardItem]) -> None:
    """``RewardError`` where a sum, over tokens or functions, is beyond float32."""
    wrong = (~sums_S.isfinite()).nonzero().flatten().tolist()
    if wrong:
        text = "the sum is beyond what float32 holds; scale the values, or lower the weights"
        raise RewardError(complaint(name, items[wrong[0]], wrong[0], text))


def _failures(outcomes: Sequence[Outcome]) -> Tensor:
    codes = {"error": ERROR, "timeout": TIMEOUT}
    return torch.tensor(
        [codes[o.kind] if isinstance(o, Failure) else 0 for o in outcomes], dtype=torch.int8
    )
