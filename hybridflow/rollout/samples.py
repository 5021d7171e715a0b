"""A server's samples as the fields of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.recipe.axes import Axis
from hybridflow.rollout.errors import RolloutError
from hybridflow.rollout.protocol import Sample

_AXES = {
    "responses": Axis.TOKENS,
    "rollout_logprobs": Axis.TOKENS,
    "token_versions": Axis.TOKENS,
    "finished": Axis.SAMPLES,
    "versions": Axis.SAMPLES,
}


def batch_of(groups: Sequence[Sequence[Sample]], samples_per_prompt: int) -> Batch:
    """The samples of each prompt, with G = ``samples_per_prompt``; there may be no prompt."""
    samples = [sample for group in groups for sample in group]
    fields = {
        "responses": Ragged.from_rows([s.tokens for s in samples], torch.int64),
        "rollout_logprobs": Ragged.from_rows([s.logprobs for s in samples], torch.float32),
        "token_versions": Ragged.from_rows([token_versions(s) for s in samples], torch.int64),
        "finished": torch.tensor([s.finish_reason == "stop" for s in samples], dtype=torch.bool),
        "versions": torch.tensor([int(s.weight_version) for s in samples], dtype=torch.int64),
    }
    return Batch(fields, _AXES, len(groups), samples_per_prompt)


def token_versions(sample: Sample) -> list[int]:
    """The version that each token was sampled from; RolloutError when a token has none, or two."""
    versions: list[int] = []
    for span in sample.spans:
        if span.start != len(versions):
            break
        versions += [int(span.version)] * (span.end - span.start)
    if len(versions) != len(sample.tokens):
        raise RolloutError(
            f"a server's weight versions {sample.spans} do not cover the {len(sample.tokens)} "
            "tokens of its response one by one"
        )
    return versions
