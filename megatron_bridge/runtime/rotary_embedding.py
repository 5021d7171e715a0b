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
        limit: the longest sequence that they are right for; None: any.
    """

    inverse: Tensor
    factor: float = 1.0
    limit: int | None = None


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
    """The short factors, which hold up to the trained length.

    A longer sequence takes the long ones from its first token on, so one pack would need both.
    """
    short = torch.tensor(parameters["short_factor"], dtype=torch.float32)
    trained, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return Frequencies(1.0 / (short * powers), scale, limit=trained)


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
        of_layers: the frequencies, or two: of layers that see everything and of those with a
            sliding window. Their angles then lie side by side in what ``forward`` returns, and
            ``PerLayerRotaryAttention`` takes its own.
    """

    def __init__(self, of_layers: list[Frequencies], *, interleaved: bool, cp_group: Any) -> None:
        first = of_layers[0].inverse
        super().__init__(
            2 * len(first),
            rotary_percent=1.0,
            rotary_interleaved=interleaved,
            use_cpu_initialization=True,
            cp_group=cp_group,
        )
        self.inv_freq = first
        self.others = [one.inverse for one in of_layers[1:]]
        limits = [one.limit for one in of_layers if one.limit is not None]
        self.limit = min(limits, default=None)

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """[max_seq_len, 1, 1, D], or 2 D where there are two kinds of layers.

        Raises:
            ValueError: for a sequence that the frequencies are not right for.
        """
        if self.limit is not None and max_seq_len + offset > self.limit:
            raise ValueError(
                f"a sequence has {max_seq_len + offset} tokens; this model's rope scaling "
                f"(longrope) changes all angles beyond {self.limit} tokens, which packs of longer "
                f"and shorter sequences cannot share: keep prompt and response within {self.limit}"
            )
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
    both = [wanted.rotary, wanted.local_rotary]
    of_layers = [frequencies(one, config.kv_channels) for one in both if one is not None]
    assert len({(len(one.inverse), one.factor) for one in of_layers}) == 1, "of equal form"
    model.rotary_pos_emb = Rotary(
        of_layers,
        interleaved=config.rotary_interleaved,
        cp_group=model.rotary_pos_emb.cp_group,
    )
    if of_layers[0].factor != 1.0:
        _scale_angles(config, of_layers[0].factor)


def _scale_angles(config: Any, factor: float) -> None:
    """Makes Megatron multiply cosines and sines by ``factor``.

    It computes (0.1 mscale ln(scaling) + 1) / (0.1 mscale_all_dim ln(scaling) + 1) of these.
    """
    config.yarn_rotary_scaling_factor = math.exp(10)
    config.yarn_mscale = factor - 1
    config.yarn_mscale_all_dim = 0.0
