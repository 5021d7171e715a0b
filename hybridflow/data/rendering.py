"""From a row's prompt (text or chat messages) to the text that the model will see."""

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hybridflow.data.messages import ASSISTANT, REASONING, SPOKEN, Message, kind, read_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
"""Marks of transformers around what the assistant writes."""


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

    ``unread`` gathers keys of messages that the template does not read.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", settings: DataSettings) -> None:
        has_template = bool(tokenizer.chat_template)
        self.tokenizer = tokenizer
        self.eos_token_id = _eos(tokenizer)
        self.system = settings.system
        self.chat = has_template if settings.chat is None else settings.chat
        self.unread: set[str] = set()
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
        if self.chat:
            _check_template(self.template)

    def text(self, prompt: Any) -> str:
        """The prompt as the model will see it, up to where its answer begins.

        Raises:
            ValueError: the prompt is neither text nor messages, or messages without a template.
        """
        if not self.chat:
            if isinstance(prompt, str):
                return prompt
            raise ValueError(
                f"it is {kind(prompt)}, but no chat template is used: the prompt must be text"
            )
        return self.render(self.messages(prompt), True)

    def render(self, messages: list[Message], prompts: bool) -> str:
        """Messages through the template; ``prompts``: up to where the assistant's turn begins."""
        rendered = self.apply(messages, tokenize=False, add_generation_prompt=prompts)
        assert isinstance(rendered, str)
        return rendered

    def apply(self, messages: list[Message], **options: Any) -> Any:
        """The tokenizer's template over messages; ValueError when the template refuses them."""
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # a template is a program of its own
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the chat template refuses messages of {roles}: {error}") from error

    @cached_property
    def template(self) -> str:
        """The chat template's text."""
        return str(self.tokenizer.get_chat_template())

    @cached_property
    def opening(self) -> str:
        """What the template writes before the assistant speaks; empty when it cannot be told."""
        asked = [{"role": "user", "content": "?"}]
        before, through = self.render(asked, False), self.render(asked, True)
        return through.removeprefix(before) if through.startswith(before) else ""

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that no plain text is made of."""
        tokenizer: Any = self.tokenizer
        known = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        return frozenset(known - {tokenizer.unk_token_id})

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of rendered texts. A template writes its own special tokens, so none are
        added to what it wrote; plain text gets those that the tokenizer adds."""
        return self._ids(texts, not self.chat)

    def encode_answers(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts that follow a prompt, so that no special token is added."""
        return self._ids(texts, False)

    def _ids(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        # Not verbose: rows that are too long are counted here, without transformers' own warning.
        encoded = self.tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)
        return encoded["input_ids"]  # type: ignore[return-value]

    def messages(self, prompt: Any) -> list[Message]:
        """A prompt as messages that end where the assistant is to answer."""
        messages = self.conversation(as_messages(prompt))
        if messages[-1]["role"] == ASSISTANT:
            raise ValueError(
                "the prompt ends with a message of the assistant; the model is to write that one: "
                "end it with the user's"
            )
        return messages

    def conversation(self, value: Any) -> list[Message]:
        """Messages of any roles, the recipe's system message before them.

        Raises:
            ValueError: they are none, or hold what the template would not show the model.
        """
        if not self.chat:
            raise ValueError("conversations need a chat template, and none is used")
        messages = read_messages(value)
        for position, message in enumerate(messages):
            self._check_keys(position, message)
        if self.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        return messages

    def _check_keys(self, position: int, message: Message) -> None:
        """What a turn says beside its content must be something that the template reads."""
        read = self._words | (set(REASONING) if self._words & set(REASONING) else set())
        unread = message.keys() - read
        if lost := [key for key in SPOKEN if key in unread and message[key]]:
            raise ValueError(
                f"message {position} has `{lost[0]}`, which the chat template does not read, so "
                "the model would not see it: take a tokenizer whose template reads it, or remove "
                "the key from the data"
            )
        self.unread |= unread

    @cached_property
    def _words(self) -> frozenset[str]:
        """Words of the template, among them the keys of messages that it reads."""
        return frozenset(re.findall(r"\w+", self.template))


def as_messages(prompt: Any) -> Any:
    """A prompt that is text as the user's message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _check_template(template: str) -> None:
    """ValueError when a chat template is not valid Jinja."""
    import jinja2

    plain = GENERATION.sub("", template)  # a tag that transformers adds to Jinja
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the tokenizer's chat template is not valid, line {error.lineno}: {error.message}; "
            "restore it in the model's folder, or set data.chat to false"
        ) from error


def _eos(tokenizer: "PreTrainedTokenizerBase") -> int:
    if not isinstance(tokenizer.eos_token_id, int):
        raise ValueError(
            "the tokenizer has no end-of-sequence token, so an answer could not end: "
            "set eos_token in the model folder's tokenizer_config.json"
        )
    return tokenizer.eos_token_id
