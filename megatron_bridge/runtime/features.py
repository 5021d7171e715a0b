"""What a model computes that Megatron's TransformerConfig cannot say."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Features:
    """Set as ``config.bridge`` on a TransformerConfig; our layer specs read it.

    Attributes:
        input_norms: whether attention and MLP norm their input.
        post_norms: whether attention and MLP norm their output, before it is added.
        wide_qk_norm: whether queries (and keys) are normed over all heads at once; ``qk_layernorm``
            of the TransformerConfig, a norm for each head, is then off.
        linear_biases: whether every projection, the router and the experts have biases.
        embedding_scale: the embedding's output is multiplied by it, rounded to its dtype.
        rotary: ``rope_parameters`` in transformers 5's form, complete; None: with latent attention
            (MLA), whose arguments are MLATransformerConfig's.
        local_rotary: those of layers with a sliding window, where they differ.
        router_group_experts: how many of a group's best experts rank the group, where routing is
            limited to groups; None: as many as Megatron takes, topk divided by the groups chosen.
        latent_norm_eps: epsilon of the norms of MLA's compressed queries and keys; None: that of
            the other norms.
    """

    input_norms: bool = True
    post_norms: bool = False
    wide_qk_norm: bool = False
    linear_biases: bool = False
    embedding_scale: float | None = None
    rotary: dict[str, Any] | None = None
    local_rotary: dict[str, Any] | None = None
    router_group_experts: int | None = None
    latent_norm_eps: float | None = None


def features(config: Any) -> Features:
    """The features of a TransformerConfig; one that nobody set any on has none."""
    return getattr(config, "bridge", None) or Features()
