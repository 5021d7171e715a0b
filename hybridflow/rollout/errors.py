"""What a rollout server did not do."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.rollout.protocol import LoaderStatus


class RolloutError(RuntimeError):
    """A server refused or lost a request. The text carries the server's own words."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class LoadFailed(RolloutError):
    """A server's loader refused or failed; `statuses` are those of the ranks that wrote one.

    `touched`: parameters may have changed, so the server must not serve before they are proven.
    """

    def __init__(self, text: str, statuses: Sequence[LoaderStatus], touched: bool) -> None:
        super().__init__(text)
        self.statuses, self.touched = tuple(statuses), touched


class RolloutTimeout(RolloutError):
    """A server did not answer within the deadline that the text names."""


def root_cause(error: BaseException) -> str:
    """The words of what an error began with: "Connection refused", not the stack of libraries that
    passed it on."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
