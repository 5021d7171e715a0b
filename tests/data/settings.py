"""The part of a recipe that rows depend on."""

from dataclasses import dataclass


@dataclass
class Settings:
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    chat: bool | None = None
    system: str | None = None
    max_prompt_tokens: int = 64
