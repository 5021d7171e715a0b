"""Rewards from a service: batches of samples are posted, their rewards come back."""

import asyncio
import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from hybridflow.rewards.deadline import seconds_left
from hybridflow.rewards.items import RewardItem
from hybridflow.rewards.results import InvalidResult, checked

_LARGEST_REPLY = 1 << 24
_EXCERPT_CHARACTERS = 200
_LONGEST_PAUSE = 8.0
_LONGEST_TRY = 30.0


class ServiceError(RuntimeError):
    """The service did not answer, or answered something else than rewards: the samples' failure,
    not a mistake of the program."""


class ServiceLate(ServiceError, TimeoutError):
    """The service had not answered by the deadline."""


class Http:
    """Posts ``{"samples": [{"prompt", "response", "answer"}, ...]}`` as JSON to a URL, and takes
    ``{"rewards": [...]}``: a number for each sample, or a list of one for each of its ``tokens``.

    Connections that fail or take too long, and the statuses 429 and 5xx, are tried again; redirects
    are not followed, and proxies of the environment are not used.

    Args:
        url: where to post; ``http`` or ``https``, without a password in it.
        batch: most samples of one request.
        calls_at_once: most requests under way.
        headers: sent with each request.
        token_env: environment variable of the reward's workers whose value is sent as
            ``Authorization: Bearer ...``.
        timeout_seconds: deadline of each try; None: an equal share of what the samples' deadline
            leaves, 30 s at most.
        retries: tries after the first one, within the samples' deadline.
        send_row: also send the whole row of data as ``row``.

    Raises:
        ValueError: the URL is none, or the variable is not set.
    """

    def __init__(
        self,
        *,
        url: str,
        batch: int = 32,
        calls_at_once: int = 4,
        headers: Mapping[str, str] | None = None,
        token_env: str | None = None,
        timeout_seconds: float | None = None,
        retries: int = 2,
        send_row: bool = False,
    ) -> None:
        self._place = urlsplit(url)
        known = self._place.scheme in ("http", "https") and self._place.hostname
        if not known or self._place.password or self._place.username:
            raise ValueError(
                "http: url must be http://HOST[:PORT]/PATH or https://..., without a password; "
                "name the variable of a token by `token_env`"
            )
        if batch < 1 or calls_at_once < 1 or retries < 0 or not (timeout_seconds or 1) > 0:
            raise ValueError(
                "http: batch and calls_at_once must be 1 or more, retries 0 or more and "
                "timeout_seconds more than 0"
            )
        self.url = url
        self.batch = batch
        self.calls_at_once = calls_at_once
        self._seconds = timeout_seconds
        self._tries = retries + 1
        self._send_row = send_row
        self._path = urlunsplit(("", "", self._place.path or "/", self._place.query, ""))
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if token_env is not None:
            if not os.environ.get(token_env):
                raise ValueError(f"http: the environment variable {token_env} is not set")
            self._headers["Authorization"] = f"Bearer {os.environ[token_env]}"
        self._threads = ThreadPoolExecutor(calls_at_once, thread_name_prefix="http")

    async def score(self, items: Sequence[RewardItem]) -> Any:
        """The rewards that the service gives ``items``, and a ``ServiceError`` in the place of each
        that is none; raised when there are none at all."""
        body = json.dumps({"samples": [self._sample(item) for item in items]}).encode()
        end = time.monotonic() + seconds_left()
        loop = asyncio.get_running_loop()
        values = await loop.run_in_executor(self._threads, self._ask, body, end)
        if len(values) != len(items):
            raise ServiceError(f"{self.url}: {len(values)} rewards for {len(items)} samples")
        return [self._checked(v, item) for v, item in zip(values, items, strict=True)]

    def _checked(self, value: Any, item: RewardItem) -> Any:
        try:
            return checked(value, item)
        except InvalidResult as error:
            return ServiceError(f"{self.url}: {error}")

    def _sample(self, item: RewardItem) -> dict[str, Any]:
        sample = {"prompt": item.prompt, "response": item.response, "answer": item.answer}
        if item.tokens is not None:
            sample["tokens"] = item.tokens
        return {**sample, "row": item.row} if self._send_row else sample

    def _ask(self, body: bytes, end: float) -> list[Any]:
        """The rewards of a reply that came by ``end``, a monotonic time."""
        problem, late, tries = "no time was left to ask", True, 0
        while tries < self._tries:
            pause = min(0.25 * 2**tries, _LONGEST_PAUSE) if tries else 0.0
            left = end - time.monotonic() - pause
            if left <= 0:
                break
            time.sleep(pause)
            share = min(left / (self._tries - tries), _LONGEST_TRY)
            reply, problem, late = self._try(body, min(self._seconds or share, left))
            if reply is not None:
                return _rewards(self.url, reply)
            tries += 1
        kind = ServiceLate if late else ServiceError
        raise kind(f"{self.url}: {problem} ({tries} tries)")

    def _try(self, body: bytes, seconds: float) -> tuple[bytes | None, str, bool]:
        """The reply, or what is worth another try, and whether it is that the time was up."""
        connection = self._connection(seconds)
        late = threading.Event()

        def give_up() -> None:
            late.set()
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, give_up)  # a reply may drip for ever
        timer.daemon = True
        try:
            connection.connect()
            stream = connection.sock
            timer.start()
            connection.request("POST", self._path, body, self._headers)
            response = connection.getresponse()
            reply = response.read(_LARGEST_REPLY + 1)
        except (OSError, http.client.HTTPException) as error:
            if late.is_set() or isinstance(error, TimeoutError):
                return None, f"no whole reply within {seconds:.3g} s", True
            return None, f"{type(error).__name__}: {error}", False
        finally:
            timer.cancel()
            connection.close()
        if late.is_set():
            return None, f"no whole reply within {seconds:.3g} s", True
        if len(reply) > _LARGEST_REPLY:
            raise ServiceError(f"{self.url}: a reply of more than {_LARGEST_REPLY} bytes")
        if response.length:
            text = f"the connection ended {response.length} bytes before the reply did"
            return None, text, False
        status = f"{response.status} {response.reason}: {_excerpt(reply)}"
        if response.status == 429 or response.status >= 500:
            return None, status, False
        if response.status != 200:
            raise ServiceError(f"{self.url}: {status}")
        return reply, "", False

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        host, port = str(self._place.hostname), self._place.port
        if self._place.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=seconds, context=context)
        return http.client.HTTPConnection(host, port, timeout=seconds)


def _rewards(url: str, reply: bytes) -> list[Any]:
    try:
        found = json.loads(reply)
    except (ValueError, RecursionError) as error:
        raise ServiceError(f"{url}: the reply is no JSON: {_excerpt(reply)}") from error
    if not isinstance(found, dict) or not isinstance(found.get("rewards"), list):
        raise ServiceError(f'{url}: the reply is not {{"rewards": [...]}}: {_excerpt(reply)}')
    return found["rewards"]


def _excerpt(reply: bytes) -> str:
    text = reply[:_EXCERPT_CHARACTERS].decode(errors="replace")
    return repr(text + ("..." if len(reply) > _EXCERPT_CHARACTERS else ""))
