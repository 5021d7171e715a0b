"""One response to score, and how messages quote it."""

from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["sequence", "token"]
"""One value for each response, or one for each of its tokens."""

_EXCERPT_CHARACTERS = 200


@dataclass(frozen=True)
class RewardItem:
    """One response to score, and the row of data it answers.

    Attributes:
        tokens: texts of the response's tokens, special ones (the end of sequence) left out; a
            reward of level ``token`` gives one value for each. None at level ``sequence``.
    """

    prompt: str
    response: str
    answer: Any
    row: dict[str, Any]
    tokens: tuple[str, ...] | None = None

    def describe(self, index: int) -> str:
        """The sample as messages name it; ``index`` is its place in the batch."""
        return (
            f"sample {index} (prompt {_excerpt(self.prompt)}, response {_excerpt(self.response)}, "
            f"answer {_excerpt(str(self.answer))})"
        )


def _excerpt(text: str) -> str:
    if len(text) > _EXCERPT_CHARACTERS:
        text = text[: _EXCERPT_CHARACTERS - 3] + "..."
    return repr(text)
