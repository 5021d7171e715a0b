"""Rewards from a classification model of transformers, read from a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.recipe.rules import END, SCORED_AT
from hybridflow.rewards.items import RewardItem


class RewardModel:
    """The logit that a ``*ForSequenceClassification`` gives prompt and response, on the CPU.

    Weights are safetensors and the code is transformers' own: nothing of the folder is run.

    Args:
        path: the model's folder, with its tokenizer.
        batch: most samples of one forward pass.
        label: which logit is the reward; needed where the model has several.
        dtype: of the weights.
        max_tokens: most tokens of a sample; None: what the model has positions for. A longer one
            is an error of its sample.
        chat_column: column of the row with the prompt as text or messages, for the model's own chat
            template; None: the prompt as the trained model saw it, then the response.
        suffix: follows the response, such as the end-of-sequence token's text; None: that token
            for a model that was trained here, and for the prompt as plain text; else nothing.

    Raises:
        ValueError: no such folder, or not all that a reward needs is in it.
    """

    def __init__(
        self,
        *,
        path: str,
        batch: int = 8,
        label: int | None = None,
        dtype: str = "float32",
        max_tokens: int | None = None,
        chat_column: str | None = None,
        suffix: str | None = None,
    ) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if not (Path(path) / "config.json").is_file():
            raise ValueError(f"reward_model: {path} is no model folder; nothing is downloaded")
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, **local)
            self._model, found = AutoModelForSequenceClassification.from_pretrained(
                path,
                use_safetensors=True,
                output_loading_info=True,
                dtype=getattr(torch, dtype),
                **local,
            )
        except Exception as error:
            raise ValueError(f"reward_model: {path}: {type(error).__name__}: {error}") from error
        if missing := sorted(found["missing_keys"]):
            raise ValueError(
                f"reward_model: {path} lacks {', '.join(missing)}: it is no reward model, and "
                "random weights would score at random"
            )
        names = self._model.config.architectures or []  # as the folder has them
        if any(name.endswith("ForTokenClassification") for name in names):
            raise ValueError(
                f"reward_model: {path} scores tokens, and this takes the last one alone; score "
                "with a role `head: value` whose node has `pooling: mean`"
            )
        self._model.eval()
        self._label = _label(path, self._model.config.num_labels, label)
        positions = getattr(self._model.config, "max_position_embeddings", None)
        self._max_tokens = max_tokens or positions
        if chat_column is not None and not self._tokenizer.chat_template:
            raise ValueError(f"reward_model: {path} has no chat template; remove chat_column")
        self._chat_column = chat_column
        if suffix is None:
            ends = getattr(self._model.config, SCORED_AT, None) == END and chat_column is None
            suffix = (self._tokenizer.eos_token or "") if ends else ""
        self._suffix = suffix
        self.batch = batch
        pad = self._tokenizer.pad_token_id
        # The score is read at the last token that is no padding: padding must be nothing else.
        self._pads = pad is not None and pad != self._tokenizer.eos_token_id
        if self._pads:
            self._model.config.pad_token_id = pad

    def score(self, items: Sequence[RewardItem]) -> list[float | ValueError]:
        """One logit per item, and a ``ValueError`` in the place of one that cannot be read."""
        read = [self._try_ids(item) for item in items]
        rows = [row for row in read if not isinstance(row, ValueError)]
        parts = [rows] if self._pads and rows else [[row] for row in rows]
        scores = iter([score for part in parts for score in self._logits(part)])
        return [row if isinstance(row, ValueError) else next(scores) for row in read]

    def _try_ids(self, item: RewardItem) -> list[int] | ValueError:
        try:
            return self._ids(item)
        except ValueError as error:
            return error

    def _logits(self, rows: list[list[int]]) -> list[float]:
        import torch

        longest = max(map(len, rows))
        pad = self._tokenizer.pad_token_id if self._pads else 0
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        with torch.inference_mode():
            logits = self._model(input_ids=ids, attention_mask=mask).logits
        return logits[:, self._label].float().tolist()

    def _ids(self, item: RewardItem) -> list[int]:
        text = self._text(item)
        bos = self._tokenizer.bos_token
        add_special = bos is None or not text.startswith(bos)
        ids = self._tokenizer(text, add_special_tokens=add_special)["input_ids"]
        if not ids:
            raise ValueError("a sample without a token")
        if self._max_tokens is not None and len(ids) > self._max_tokens:
            raise ValueError(
                f"a sample of {len(ids)} tokens, more than the model's {self._max_tokens}"
            )
        return ids

    def _text(self, item: RewardItem) -> str:
        if self._chat_column is None:
            return item.prompt + item.response + self._suffix
        if self._chat_column not in item.row:
            raise ValueError(f"the row has no column '{self._chat_column}' (chat_column)")
        prompt = item.row[self._chat_column]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        messages = [*messages, {"role": "assistant", "content": item.response}]
        return self._tokenizer.apply_chat_template(messages, tokenize=False) + self._suffix


def _label(path: str, count: int, label: int | None) -> int:
    if label is None and count > 1:
        raise ValueError(f"reward_model: {path} has {count} logits; say which one by `label`")
    if label is not None and not 0 <= label < count:
        raise ValueError(f"reward_model: {path} has {count} logits, so none is `label: {label}`")
    return label or 0
