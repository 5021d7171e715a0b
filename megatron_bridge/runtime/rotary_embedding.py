"""Rotary frequencies of every kind that the tables know, installed on a GPTModel.

Megatron's own embedding knows plain frequencies and Llama 3's scaling with three of its factors
fixed. Its code for using frequencies is general, so only these are replaced.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from megatron_bridge.runtime.features import features

Parameters = dict[str, Any]


@dataclass(frozen=True)
class Frequencies:
    """What a rotary embedding rotates by.

    Attributes:
        inverse: [D / 2] angle from one position to the next, for each pair of a head's first D
            components.
        factor: cosines and sines are multiplied by it.
        longer: those of sequences of more than ``trained`` tokens; None: the same.
        trained: how many tokens that is.
    """

    inverse: Tensor
    factor: float = 1.0
    longer: Tensor | None = None
    trained: int = 0


def frequencies(parameters: Parameters, head_dim: int) -> Frequencies:
    """The frequencies that ``rope_parameters`` of a config.json describe.

    Args:
        parameters: in transformers 5's form, checked and completed by the architecture's table.
        head_dim: the size of a head; ``partial_rotary_factor`` of it is rotated.
    """
    dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    powers = parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return _KINDS[parameters["rope_type"]](powers, parameters)


def _plain(powers: Tensor, _parameters: Parameters) -> Frequencies:
    return Frequencies(1.0 / powers)


def _linear(powers: Tensor, parameters: Parameters) -> Frequencies:
    return Frequencies(1.0 / powers / parameters["factor"])


def _llama3(powers: Tensor, parameters: Parameters) -> Frequencies:
    """Long waves are stretched, short ones stay, between them it goes over smoothly."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    trained = parameters["original_max_position_embeddings"]
    plain = 1.0 / powers
    wave = 2 * math.pi / plain
    stretched = plain / parameters["factor"]
    smooth = (trained / wave - low) / (high - low)
    between = (1 - smooth) * stretched + smooth * plain
    scaled = torch.where(wave > trained / low, stretched, plain)
    medium = (wave >= trained / high) & (wave <= trained / low)
    return Frequencies(torch.where(medium, between, scaled))


def _yarn(powers: Tensor, parameters: Parameters) -> Frequencies:
    dim, base = 2 * len(powers), parameters["rope_theta"]
    trained = parameters["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        """The component that turns so often over the trained length."""
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension(parameters.get("beta_fast") or 32)
    high = dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    stretched = torch.clamp((torch.arange(len(powers)).float() - low) / (high - low), 0, 1)
    factor = parameters["factor"]
    inverse = stretched / (factor * powers) + (1 - stretched) / powers
    return Frequencies(inverse, _yarn_factor(parameters))


def _yarn_factor(parameters: Parameters) -> float:
    def scale(weight: float) -> float:
        factor = parameters["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = parameters.get("attention_factor")
    if given is not None:
        return given
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)


def _longrope(powers: Tensor, parameters: Parameters) -> Frequencies:
    """Sequences longer than the trained ones turn by other factors from their first token on."""
    short, long = (
        torch.tensor(parameters[name], dtype=torch.float32)
        for name in ("short_factor", "long_factor")
    )
    trained, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return Frequencies(1.0 / (short * powers), scale, 1.0 / (long * powers), trained)


_KINDS: dict[str, Callable[[Tensor, Parameters], Frequencies]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


class Rotary(RotaryEmbedding):
    """Megatron's rotary embedding with frequencies of ours.

    Args:
        kinds: inverse frequencies, of one kind or two: of layers without and with a sliding
            window, or of sequences up to the trained length and beyond. The angles of both then
            lie side by side in what ``forward`` returns, and the attentions of ``rotary_choice``
            take theirs.
    """

    def __init__(self, kinds: list[Tensor], *, interleaved: bool, cp_group: Any) -> None:
        first, *self.others = kinds
        super().__init__(
            2 * len(first),
            rotary_percent=1.0,
            rotary_interleaved=interleaved,
            use_cpu_initialization=True,
            cp_group=cp_group,
        )
        self.inv_freq = first

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """[max_seq_len, 1, 1, D], or 2 D where there are two kinds."""
        parts = [super().get_emb(max_seq_len, offset)]
        first = self.inv_freq
        for index, inverse in enumerate(self.others):
            self.others[index] = self.inv_freq = inverse.to(first.device)
            parts.append(super().get_emb(max_seq_len, offset))
        self.inv_freq = first
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def install(model: Any, config: Any) -> None:
    """Gives a GPTModel the rotary frequencies of ``config.bridge``.

    Latent attention (MLA) has its own; ``MLATransformerConfig`` describes them.

    Args:
        model: a GPTModel, as built.
        config: its TransformerConfig.
    """
    wanted = features(config)
    if config.multi_latent_attention:
        return
    assert wanted.rotary is not None, "the architecture's features lack the rotary embedding"
    made = frequencies(wanted.rotary, config.kv_channels)
    kinds = [made.inverse]
    if made.longer is not None:
        assert wanted.local_rotary is None
        kinds.append(made.longer)
    if wanted.local_rotary is not None:
        local = frequencies(wanted.local_rotary, config.kv_channels)
        assert local.factor == made.factor and len(local.inverse) == len(made.inverse)
        kinds.append(local.inverse)
    model.rotary_pos_emb = Rotary(
        kinds,
        interleaved=config.rotary_interleaved,
        cp_group=model.rotary_pos_emb.cp_group,
    )
    if made.factor != 1.0:
        _scale_angles(config, made.factor)


def _scale_angles(config: Any, factor: float) -> None:
    """Makes Megatron multiply cosines and sines by ``factor``.

    It computes (0.1 mscale ln(scaling) + 1) / (0.1 mscale_all_dim ln(scaling) + 1) of these.
    """
    config.yarn_rotary_scaling_factor = math.exp(10)
    config.yarn_mscale = factor - 1
    config.yarn_mscale_all_dim = 0.0
