"""Attention of packs in which several responses share one prompt's hidden states.

Queries, keys and values are spread to whole sequences, the model's own packed attention runs, and
its output is gathered back to the pack's tokens. Autograd adds up the gradients that a shared
prompt gets from each of its responses.
"""

from dataclasses import dataclass
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from hybridflow.algorithms.packing import Pack
from megatron_bridge.runtime.attention import CoreAttention
from megatron_bridge.runtime.rotary_choice import PerLengthRotaryAttention


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


def _spread(_core: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A forward pre-hook of a core attention: queries, keys and values of whole sequences."""
    expand_E = getattr(options["packed_seq_params"], "expand_E", None)
    if expand_E is None:
        return None
    query, key, value, *others = inputs
    whole = (x.index_select(0, expand_E) for x in (query, key, value))
    return (*whole, *others), options


def _gather(_core: Any, _inputs: Any, options: dict[str, Any], output_ED: Tensor) -> Any:
    """A forward hook of a core attention: the outputs of the pack's own tokens."""
    place_T = getattr(options["packed_seq_params"], "place_T", None)
    return None if place_T is None else output_ED.index_select(0, place_T)


class Positions:
    """Rotary angles of the tokens of the current pack instead of those of 0, 1, 2 ..."""

    def __init__(self) -> None:
        self.position_ids_T: Tensor | None = None

    def pick(self, _module: Any, _inputs: Any, angles: Any) -> Any:
        """A forward hook of Megatron's rotary embedding.

        Args:
            angles: [L, 1, 1, D]; with YaRN a tuple of these and their scale.

        Returns:
            The same of the pack's tokens: [T, 1, 1, D].
        """
        if isinstance(angles, tuple):
            angles_L11D, *scale = angles
            return self._of_tokens(angles_L11D), *scale
        return self._of_tokens(angles)

    def _of_tokens(self, angles_L11D: Tensor) -> Tensor:
        assert self.position_ids_T is not None
        return angles_L11D.index_select(0, self.position_ids_T)


def install(model: Any) -> Positions | None:
    """Prepares a ``GPTModel`` for packs with shared prompts.

    Returns:
        What is told the positions of each pack. None when packs must share nothing: where the
        model's attention is not ours (that of transformer-engine reads sequences in place), where
        rotary angles depend on a sequence's length (longrope), or where experts are balanced by
        how many tokens they got (each prompt would count once).
    """
    attentions = [layer.self_attention for layer in model.decoder.layers]
    ours = all(isinstance(attention.core_attention, CoreAttention) for attention in attentions)
    by_length = any(isinstance(one, PerLengthRotaryAttention) for one in attentions)
    if not ours or by_length or _balances_experts(model.config):
        return None
    for attention in attentions:
        # Hooks: a wrapper would change the names of the attention's own parameters (its sinks).
        attention.core_attention.register_forward_pre_hook(_spread, with_kwargs=True)
        attention.core_attention.register_forward_hook(_gather, with_kwargs=True)
    positions = Positions()
    for rotary in _rotaries(model, attentions):
        rotary.register_forward_hook(positions.pick)
    return positions


def _rotaries(model: Any, attentions: list[Any]) -> list[Any]:
    """The rotary embeddings: the model's own, or with latent attention one for each layer."""
    if model.config.multi_latent_attention:
        return [attention.rotary_pos_emb for attention in attentions]
    return [model.rotary_pos_emb]


def _balances_experts(config: Any) -> bool:
    """Whether training depends on the number of tokens that each expert gets."""
    if config.num_moe_experts is None:
        return False
    coefficient = config.moe_aux_loss_coeff
    losses = coefficient if isinstance(coefficient, list) else [coefficient]
    moves_bias = config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate
    return any(losses) or bool(moves_bias)
