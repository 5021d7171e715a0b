"""A process that scores responses with one function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybridflow.batch import Batch
from hybridflow.cluster.transfer import DATA_PARALLEL, transfer
from hybridflow.data import load_tokenizer
from hybridflow.recipe.axes import Axis
from hybridflow.rewards import RewardItem, resolve, score_batch


class RewardWorker:
    """Holds the function and the tokenizer; each call scores its share of a batch.

    With ``own_process`` a function that blocks every thread past its deadline ends the process.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        rendezvous: tuple[str, int],
        *,
        model_path: str,
        function: str,
        parameters: Mapping[str, Any],
        timeout_seconds: float,
        own_process: bool,
    ) -> None:
        self._tokenizer = load_tokenizer(model_path)
        self._function = resolve(function, parameters)
        self._timeout_seconds = timeout_seconds
        self._own_process = own_process

    @transfer(DATA_PARALLEL)
    def score(self, batch: Batch) -> Batch:
        """rewards (samples, float32) of prompts, answers and responses."""
        texts = self._tokenizer.batch_decode(
            [row.tolist() for row in batch["responses"].rows()], skip_special_tokens=True
        )
        groups = batch.samples_per_prompt
        items = [_item(batch["answers"][i // groups], text) for i, text in enumerate(texts)]
        rewards = score_batch(
            self._function, items, self._timeout_seconds, own_process=self._own_process
        )
        return Batch(
            {"rewards": torch.tensor(rewards, dtype=torch.float32)},
            {"rewards": Axis.SAMPLES},
            batch.prompts,
            groups,
        )


def _item(answer: dict[str, Any], response: str) -> RewardItem:
    return RewardItem(answer["prompt_text"], response, answer["answer"], answer)
