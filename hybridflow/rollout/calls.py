"""A call of a fleet's ``generate``, and the requests to engines that it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hybridflow.batch import Batch
from hybridflow.rollout.engines import EngineFailed, GenerateRequest
from hybridflow.rollout.protocol import Sampling
from hybridflow.rollout.roster import Member
from hybridflow.rollout.routing import expected_tokens


@dataclass(eq=False)
class OpenRequest:
    """A request that is not closed yet; ``tokens`` is what it may take."""

    request: GenerateRequest
    member: Member[Any]
    tokens: int
    deadline: float
    answer: Future[Batch] = field(default_factory=Future)


class Call:
    """One call of ``Fleet.generate``: what is asked, and the answers so far."""

    def __init__(self, batch: Batch, samples: int, sampling: Sampling) -> None:
        self._batch, self._samples, self._sampling = batch, samples, sampling
        self.prompts = [tuple(row.tolist()) for row in batch["prompts"].rows()]
        self._answers: list[tuple[tuple[int, ...], Batch]] = []

    def tokens(self, position: int) -> int:
        """What the prompt there may take."""
        return expected_tokens(
            len(self.prompts[position]), self._samples, self._sampling.max_tokens
        )

    def request(self, name: str, positions: Sequence[int]) -> GenerateRequest:
        """The prompts at ``positions`` as a request; all of them go as they are."""
        everything = len(positions) == self._batch.prompts
        batch = self._batch if everything else self._batch.take(positions)
        return GenerateRequest(name, batch, tuple(positions), self._samples, self._sampling)

    def keep(self, entry: OpenRequest) -> bool:
        """Keep the answer of a closed request; False when its engine failed."""
        try:
            self._answers.append((entry.request.positions, entry.answer.result(timeout=0)))
        except EngineFailed:
            return False
        return True

    def answer(self) -> Batch:
        """All answers in the prompts' order."""
        order = [position for positions, _ in self._answers for position in positions]
        assert sorted(order) == list(range(self._batch.prompts)), "each prompt is answered once"
        whole = Batch.concat([batch for _, batch in self._answers])
        if order == sorted(order):
            return whole
        return whole.take(sorted(range(len(order)), key=order.__getitem__))
