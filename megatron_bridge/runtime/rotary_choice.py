"""Self-attention of models with two kinds of rotary angles, which lie side by side."""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_bridge.runtime.features import features


class PerLayerRotaryAttention(SelfAttention):
    """Takes the angles of its layer's kind: without a sliding window, or with one."""

    def __init__(self, config: Any, *args: Any, layer_number: int, **options: Any) -> None:
        super().__init__(config, *args, layer_number=layer_number, **options)
        self.local = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )

    def forward(self, *args: Any, rotary_pos_emb: Any = None, **options: Any) -> Any:
        if rotary_pos_emb is not None:
            rotary_pos_emb = rotary_pos_emb.chunk(2, -1)[self.local]
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **options)


class PerLengthRotaryAttention(SelfAttention):
    """Takes the angles of each sequence's kind: up to the trained length, or longer (longrope)."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        rotary = features(config).rotary
        assert rotary is not None
        self.trained: int = rotary["original_max_position_embeddings"]

    def forward(
        self,
        *args: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> Any:
        if rotary_pos_emb is not None:
            rotary_pos_emb = self._choose(rotary_pos_emb, packed_seq_params)
        return super().forward(
            *args, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **options
        )

    def _choose(self, angles: Tensor, packed: PackedSeqParams | None) -> Tensor:
        """Of both kinds side by side [L, 1, 1, 2 D]: [L, 1, 1, D], or a row for each token."""
        if packed is None:
            return angles.chunk(2, -1)[len(angles) > self.trained]
        # Made once for all layers: they get the same angles, by their memory (which is kept), and
        # models that read the same pack have their own.
        known = getattr(packed, "_chosen_angles", None)
        if known is None or known[0].data_ptr() != angles.data_ptr():
            assert packed.cu_seqlens_q is not None
            known = angles, _of_sequences(angles, packed.cu_seqlens_q, self.trained)
            packed._chosen_angles = known  # type: ignore[attr-defined]
        return known[1]


def _of_sequences(angles: Tensor, offsets: Tensor, trained: int) -> Tensor:
    """The angles of a pack's sequences; Megatron knows T rows as those of its T tokens."""
    short, long = angles.chunk(2, -1)
    lengths = (offsets[1:] - offsets[:-1]).long()
    longer = lengths > trained
    if not longer.any():
        return short
    if longer.all():
        return long
    starts = torch.repeat_interleave(offsets[:-1].long(), lengths)
    position_T = torch.arange(len(starts), device=offsets.device) - starts
    longer_T = torch.repeat_interleave(longer, lengths)[:, None, None, None]
    return torch.where(longer_T, long[position_T], short[position_T])
