"""From a row's prompt (text or chat messages) to the text that the model will see."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DataSettings(Protocol):
    """What the recipe's ``data`` section says about rows."""

    @property
    def prompt_column(self) -> str: ...
    @property
    def answer_column(self) -> str: ...
    @property
    def chat(self) -> bool | None: ...
    @property
    def system(self) -> str | None: ...
    @property
    def max_prompt_tokens(self) -> int: ...


class Renderer:
    """Turns the prompt of a row into text, through the tokenizer's chat template or plainly.

    ``chat`` None means: use the template when the tokenizer has one. A row may bring its own
    system message; it then stands instead of the recipe's.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", settings: DataSettings) -> None:
        has_template = bool(tokenizer.chat_template)
        self.tokenizer = tokenizer
        self.system = settings.system
        self.chat = has_template if settings.chat is None else settings.chat
        if self.chat and not has_template:
            raise ValueError(
                "data.chat is true, but the tokenizer has no chat template: "
                "set data.chat to false, or use a model that was tuned for chat"
            )
        if self.system is not None and not self.chat:
            raise ValueError(
                "data.system needs a chat template, and none is used: remove data.system, "
                "or use a model whose tokenizer has a chat template"
            )

    def text(self, prompt: Any) -> str:
        """The prompt as the model will see it, up to where its answer begins.

        Raises:
            ValueError: the prompt is neither text nor messages, or messages without a template.
        """
        if not self.chat:
            if isinstance(prompt, str):
                return prompt
            raise ValueError(
                f"the prompt is {_kind(prompt)}, but no chat template is used: it must be text"
            )
        rendered = self.tokenizer.apply_chat_template(
            self._messages(prompt), tokenize=False, add_generation_prompt=True
        )
        assert isinstance(rendered, str)
        return rendered

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of rendered texts. A template writes its own special tokens, so none are
        added to what it wrote; plain text gets those that the tokenizer adds."""
        encoded = self.tokenizer(texts, add_special_tokens=not self.chat)
        return encoded["input_ids"]  # type: ignore[return-value]

    def _messages(self, prompt: Any) -> list[dict[str, str]]:
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        _check_messages(prompt)
        messages = [{"role": m["role"], "content": m["content"]} for m in prompt]
        if self.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        return messages


def _check_messages(prompt: Any) -> None:
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"the prompt must be text or a list of messages, not {_kind(prompt)}")
    for position, message in enumerate(prompt):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise ValueError(
                    f"message {position} of the prompt must be an object with texts `role` and "
                    f"`content`, not {message!r}"
                )
    if prompt[-1]["role"] == "assistant":
        raise ValueError(
            "the prompt ends with a message of the assistant; the model is to write that one: "
            "end it with the user's"
        )


def _kind(value: Any) -> str:
    if value is None:
        return "empty (null)"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return f"a {type(value).__name__}: {value!r}"[:80]
