"""From a row's prompt (text or chat messages) to the text that the model will see."""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DataSettings(Protocol):
    """What the recipe's ``data`` section says about rows."""

    @property
    def prompt_column(self) -> str: ...
    @property
    def answer_column(self) -> str: ...
    @property
    def messages_column(self) -> str | None: ...
    @property
    def turns(self) -> Literal["all", "last"]: ...
    @property
    def chosen_column(self) -> str: ...
    @property
    def rejected_column(self) -> str: ...
    @property
    def label_column(self) -> str: ...
    @property
    def margin_column(self) -> str: ...
    @property
    def chat(self) -> bool | None: ...
    @property
    def system(self) -> str | None: ...
    @property
    def max_prompt_tokens(self) -> int: ...
    @property
    def max_tokens(self) -> int | None: ...


class Renderer:
    """Turns the prompt of a row into text, through the tokenizer's chat template or plainly.

    ``chat`` None means: use the template when the tokenizer has one. A row may bring its own
    system message; it then stands instead of the recipe's.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", settings: DataSettings) -> None:
        has_template = bool(tokenizer.chat_template)
        self.tokenizer = tokenizer
        self.eos_token_id = _eos(tokenizer)
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
        return self.render(self.messages(prompt), True)

    def render(self, messages: list[dict[str, str]], prompts: bool) -> str:
        """Messages through the template; ``prompts``: up to where the assistant's turn begins."""
        rendered = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompts
        )
        assert isinstance(rendered, str)
        return rendered

    @property
    def template(self) -> str:
        """The chat template's text."""
        return str(self.tokenizer.get_chat_template())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that no plain text is made of."""
        tokenizer: Any = self.tokenizer
        known = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        return frozenset(known - {tokenizer.unk_token_id})

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of rendered texts. A template writes its own special tokens, so none are
        added to what it wrote; plain text gets those that the tokenizer adds."""
        encoded = self.tokenizer(texts, add_special_tokens=not self.chat)
        return encoded["input_ids"]  # type: ignore[return-value]

    def messages(self, prompt: Any) -> list[dict[str, str]]:
        """A prompt as messages that end where the assistant is to answer."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages = self.conversation(prompt)
        if messages[-1]["role"] == "assistant":
            raise ValueError(
                "the prompt ends with a message of the assistant; the model is to write that one: "
                "end it with the user's"
            )
        return messages

    def conversation(self, messages: Any) -> list[dict[str, str]]:
        """Messages of any roles, the recipe's system message before them."""
        if not self.chat:
            raise ValueError("conversations need a chat template, and none is used")
        check_messages(messages)
        messages = [{"role": m["role"], "content": m["content"]} for m in messages]
        if self.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        return messages


def check_messages(prompt: Any) -> None:
    """ValueError when ``prompt`` is no list of messages with texts."""
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"the prompt must be text or a list of messages, not {_kind(prompt)}")
    for position, message in enumerate(prompt):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise ValueError(
                    f"message {position} of the prompt must be an object with texts `role` and "
                    f"`content`, not {message!r}"
                )


def _eos(tokenizer: "PreTrainedTokenizerBase") -> int:
    if not isinstance(tokenizer.eos_token_id, int):
        raise ValueError(
            "the tokenizer has no end-of-sequence token, so an answer could not end: "
            "set eos_token in the model folder's tokenizer_config.json"
        )
    return tokenizer.eos_token_id


def _kind(value: Any) -> str:
    if value is None:
        return "empty (null)"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return f"a {type(value).__name__}: {value!r}"[:80]
