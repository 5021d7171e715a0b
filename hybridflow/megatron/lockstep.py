"""What data-parallel ranks must agree on before an update: passes, normalisers, steps.

Data-parallel ranks pack their own rows, so one may have fewer packs than another. Where experts
are spread over them each pass is collective, and a rank that has run out joins with an idle pack:
one token that predicts nothing, so that it adds to no loss, gradient or metric.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hybridflow.algorithms.packing import Pack
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.runtime import device


def in_lockstep(packings: list[list[Pack]], layout: ParallelLayout) -> list[list[Pack]]:
    """Each list of packs, as long as the longest that a data-parallel rank has in its place.

    Collective over data-parallel ranks where ``layout`` spreads experts over them; elsewhere the
    lists as they are, but for empty ones (every response is masked), which get an idle pack.
    """
    if not _spreads_experts(layout):
        return [packs or [_idle_pack()] for packs in packings]
    counts_M = torch.tensor([max(len(p), 1) for p in packings], device=device.device())
    dist.all_reduce(counts_M, dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
    return [
        packs + [_idle_pack()] * (count - len(packs))
        for packs, count in zip(packings, counts_M.tolist(), strict=True)
    ]


def _spreads_experts(layout: ParallelLayout) -> bool:
    """Whether ranks of different data-parallel places hold different parts of experts."""
    return layout.tp % (layout.expert_tp * layout.ep) != 0


def _idle_pack() -> Pack:
    none = torch.zeros(0, dtype=torch.int64)
    return Pack(
        input_ids_T=torch.zeros(1, dtype=torch.int64),
        position_ids_T=torch.zeros(1, dtype=torch.int64),
        offsets_N=torch.tensor([0, 1], dtype=torch.int32),
        longest=1,
        expand_E=None,
        place_T=None,
        predict_R=none,
        labels_R=none,
        source_R=none,
        sequence_R=none,
        responses_N=none,
        rows_N=none,
    )


def global_normalisers(parts: list[Any]) -> list[float | None]:
    """Each mini-batch's normaliser, summed over data-parallel ranks; None where no rank has a token
    that takes part in the loss.

    Raises:
        ValueError: on every rank alike, when one of them has nothing to learn from.
    """
    shares_M3 = torch.tensor(
        [[rows.normaliser, float(rows.tokens), float(rows.empty)] for rows in parts],
        dtype=torch.float64,
        device=device.device(),
    )
    dist.all_reduce(shares_M3, group=parallel_state.get_data_parallel_group())
    normalisers, tokens, empty = shares_M3.T.tolist()
    if any(empty):
        raise ValueError(
            f"{int(sum(empty))} of {len(parts)} mini-batches x "
            f"{parallel_state.get_data_parallel_world_size()} data-parallel ranks have no response "
            "token; use at least dp x mini_batches prompts a step"
        )
    return [share if count else None for share, count in zip(normalisers, tokens, strict=True)]
