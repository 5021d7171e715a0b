"""What can go wrong in a worker group; the first line of each names the cause, role and rank."""


class ClusterError(RuntimeError):
    """Base of every failure of a session or a worker group."""


class WorkerError(ClusterError):
    """A worker's method raised; ``kind``, ``message`` and ``trace`` are the exception's."""

    def __init__(
        self, role: str, rank: int, method: str, kind: str, message: str, trace: str, also: str = ""
    ) -> None:
        super().__init__(role, rank, method, kind, message, trace, also)
        self.role, self.rank, self.method = role, rank, method
        self.kind, self.message, self.trace, self.also = kind, message, trace, also

    def __str__(self) -> str:
        text = f"{self.role} rank {self.rank}: {self.kind} in {self.method}: {self.message}"
        return f"{text}{_after(self.also)}{_after(self.trace)}"


class WorkerDied(ClusterError):
    """A worker's process is gone. ``cause`` is what is known of why, ``log`` its last output."""

    def __init__(
        self, role: str, rank: int, method: str, cause: str, log: str = "", also: str = ""
    ) -> None:
        super().__init__(role, rank, method, cause, log, also)
        self.role, self.rank, self.method = role, rank, method
        self.cause, self.log, self.also = cause, log, also

    def __str__(self) -> str:
        text = f"{self.role} rank {self.rank} died in {self.method}: {self.cause}"
        return f"{text}{_after(self.also)}{_after(self.log)}"


class CallTimeout(ClusterError, TimeoutError):
    """Ranks did not answer a call before its deadline."""

    def __init__(
        self, role: str, ranks: tuple[int, ...], method: str, seconds: float, log: str = ""
    ) -> None:
        super().__init__(role, ranks, method, seconds, log)
        self.role, self.ranks, self.method = role, ranks, method
        self.seconds, self.log = seconds, log

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        text = (
            f"{self.role}: no answer to {self.method} within {self.seconds:g} s from rank {ranks}"
        )
        return f"{text}{_after(self.log)}"


class GroupClosed(ClusterError):
    """A call to a group that was closed."""

    def __init__(self, role: str) -> None:
        super().__init__(role)
        self.role = role

    def __str__(self) -> str:
        return f"the group '{self.role}' is closed"


def _after(text: str) -> str:
    return f"\n{text.rstrip()}" if text.strip() else ""
