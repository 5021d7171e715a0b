"""Attention of packs in which several responses share one prompt's hidden states.

Queries, keys and values are spread to whole sequences, the model's own packed attention runs, and
its output is gathered back to the pack's tokens. Autograd adds up the gradients that a shared
prompt gets from each of its responses.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from hybridflow.algorithms.packing import Pack
from megatron_bridge.runtime.attention import CoreAttention


@dataclass
class PackSequences(PackedSeqParams):
    """A pack's whole sequences, and how its tokens are spread over them; see ``Pack``."""

    expand_E: Tensor | None = None
    place_T: Tensor | None = None


def sequences_of(pack: Pack, by_position: bool) -> PackSequences:
    """Megatron's description of a pack.

    Args:
        by_position: whether rotary angles come as one row a token (see ``Positions``); Megatron
            then takes the pack for a single sequence of T tokens there.
    """
    tokens = len(pack.input_ids_T)
    whole: Any = pack.offsets_N.new_tensor([0, tokens]) if by_position else None
    return PackSequences(
        qkv_format="thd",
        cu_seqlens_q=pack.offsets_N,
        cu_seqlens_kv=pack.offsets_N,
        cu_seqlens_q_padded=whole,
        cu_seqlens_kv_padded=whole,
        max_seqlen_q=pack.longest,
        max_seqlen_kv=pack.longest,
        expand_E=pack.expand_E,
        place_T=pack.place_T,
    )


class SharedPromptAttention(torch.nn.Module):
    """A core attention, ``[T, heads, head_dim] -> [T, heads * head_dim]``, over shared prompts."""

    def __init__(self, core: CoreAttention) -> None:
        super().__init__()
        self.core = core

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any
    ) -> Any:
        sequences = options["packed_seq_params"]
        expand_E = sequences.expand_E
        if expand_E is None:
            return self.core(query, key, value, *others, **options)
        whole = (x.index_select(0, expand_E) for x in (query, key, value))
        return self.core(*whole, *others, **options).index_select(0, sequences.place_T)


class Positions:
    """Rotary angles of the tokens of the current pack instead of those of 0, 1, 2 ..."""

    def __init__(self) -> None:
        self.position_ids_T: Tensor | None = None

    def pick(self, _module: Any, _inputs: Any, angles_L11D: Tensor) -> Tensor:
        """A forward hook of Megatron's rotary embedding: ``[T, 1, 1, D]``."""
        assert self.position_ids_T is not None
        return angles_L11D.index_select(0, self.position_ids_T)


def install(model: Any) -> Positions | None:
    """Prepares a ``GPTModel`` for packs with shared prompts.

    Returns:
        What is told the positions of each pack; None when the model's attention is not ours (that
        of transformer-engine reads sequences in place, so its packs must share nothing).
    """
    attentions = [layer.self_attention for layer in model.decoder.layers]
    if not all(isinstance(attention.core_attention, CoreAttention) for attention in attentions):
        return None
    for attention in attentions:
        attention.core_attention = SharedPromptAttention(attention.core_attention)
    positions = Positions()
    model.rotary_pos_emb.register_forward_hook(positions.pick)
    return positions
