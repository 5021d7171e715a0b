"""The same number of forward passes on every rank that exchanges tokens of experts.

Data-parallel ranks pack their own rows, so one may have fewer packs than another. Where experts
are spread over them each pass is collective, and a rank that has run out joins with an idle pack:
one token that predicts nothing, so that it adds to no loss, gradient or metric.
"""

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
