"""The part of a recipe that rows depend on."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class Settings:
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    messages_column: str | None = None
    turns: Literal["all", "last"] = "all"
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"
    label_column: str = "label"
    margin_column: str = "margin"
    chat: bool | None = None
    system: str | None = None
    max_prompt_tokens: int = 64
    max_tokens: int | None = None
