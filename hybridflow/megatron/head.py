"""What a model ends in: the vocabulary, or one number a token (critics and reward models)."""

from pathlib import Path
from typing import Any

from hybridflow.recipe.rules import END, SCORED_AT
from megatron_bridge import live
from megatron_bridge.huggingface import value_heads
from megatron_bridge.huggingface.folder import HuggingFaceFolder
from megatron_bridge.registry import architecture, has_score_bias, has_value_head, labels

VOCABULARY, VALUE = "vocabulary", "value"


def model_config(folder: str | Path, head: str) -> tuple[dict[str, Any], bool]:
    """The config to build a model from, and whether its head is new: not in the folder's weights.

    Args:
        folder: in HuggingFace format; for a value head that of a base model, of a
            ``*ForSequenceClassification`` or ``*ForTokenClassification`` with one label, or of a
            causal model with a value head of TRL's beside it.
        head: ``vocabulary`` or ``value``.

    Raises:
        ValueError: the folder's model ends in something else.
    """
    config = live.load_hf_config(folder)
    if head == VALUE:
        if not has_value_head(config):
            separate = value_heads.is_separate(HuggingFaceFolder(folder))
            return dict(live.with_value_head(config, bias=separate)), not separate
        if labels(config) != 1:
            raise ValueError(
                f"{folder} ends in {labels(config)} scores and a value head has one; give a "
                "checkpoint with num_labels 1, or the base model to start from a new head"
            )
    elif has_value_head(config):
        raise ValueError(
            f"{folder} ends in scores, not in the vocabulary; use it in a role with `head: value`"
        )
    return dict(config), False


def exported_head(config: dict[str, Any], by_token: bool) -> dict[str, Any]:
    """Fields of config.json with which transformers reads an exported model's scores as they were
    trained.

    A sequence's score is the value after its last token, which transformers looks for before the
    first token of padding: where padding is the end token, it would read the value before the end.
    Without an id of padding it reads the last one, of one response at a time.

    The end token itself is part of what is read, which ``SCORED_AT`` tells to who reads texts.

    Args:
        config: of the model.
        by_token: whether a response's score was the mean over its tokens.
    """
    if not has_value_head(config) or has_score_bias(config):
        return {}
    if by_token:
        name = architecture(config).token_classifier_name
        return {"architectures": [name], "token_classification_bias": False}
    ends, pad = config.get("eos_token_id"), config.get("pad_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    return {SCORED_AT: END} | ({"pad_token_id": None} if pad is not None and pad in ends else {})
