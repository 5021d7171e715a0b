"""The scorer that reasoning-gym keeps for the row's own task."""

from collections.abc import Callable
from functools import cache

from hybridflow.recipe.names import hint
from hybridflow.rewards.tags import within

INSTALL_HINT = (
    "reasoning-gym is not installed: pip install 'hybridflow[assets]' "
    "(from a checkout: pip install -e '.[assets]')"
)


def reasoning_gym(
    prompt: str, response: str, answer: object, row: dict, *, tag: str | None = None
) -> float:
    """The score between 0 and 1 that the task's own scorer gives the response.

    The row carries the task's ``metadata`` object, whose ``source_dataset`` names the task;
    ``hybridflow make reasoning-gym`` writes such rows.

    Args:
        tag: score only what stands in the last ``<tag>...</tag>`` (nothing there scores 0);
            None scores the whole response.

    Raises:
        ValueError: the row has no such metadata, names an unknown task, or the package is missing.
    """
    metadata = row.get("metadata")
    if not isinstance(metadata, dict) or "source_dataset" not in metadata:
        raise ValueError(
            "the row has no object `metadata` with `source_dataset`, which reasoning_gym scores "
            "by; `hybridflow make reasoning-gym` writes such rows"
        )
    candidate = response.strip() if tag is None else within(response, tag)
    if candidate is None:
        return 0.0
    entry = {"question": prompt, "answer": answer, "metadata": metadata}
    return float(_scorer(metadata["source_dataset"])(candidate, entry))


def load_reasoning_gym() -> None:
    """Import the package; ValueError where it is not installed."""
    try:
        import reasoning_gym.factory  # noqa: F401
    except ImportError as error:
        raise ValueError(INSTALL_HINT) from error


@cache
def _scorer(task: str) -> Callable[[str, dict], float]:
    load_reasoning_gym()
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ValueError(f"reasoning-gym has no task '{task}'; {hint(task, DATASETS)}")
    return get_score_answer_fn(task)  # type: ignore[return-value]
