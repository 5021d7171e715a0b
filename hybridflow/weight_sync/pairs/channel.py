"""A channel between one trainer rank and one engine rank: a process group of two, by itself.

Nothing of `torch.distributed`'s global state is touched: a trainer has groups of its own.

One side listens, the other connects. A control connection carries the handshake, the rendezvous of
the process group, a header per bucket and the receipts; the group carries the payload alone.

    listener = Listener("10.0.0.1")                    # listener.endpoint goes to the peer
    channel = listener.accept(["trainer 0"], 60)["trainer 0"]
    bucket = channel.receive(0, 1 << 20)               # uint8 [nbytes], of the channel's own memory
    channel.release(0)

    channel = connect(endpoint, "trainer 0", 60)
    channel.send(0, bucket)                            # returns while it is under way
    channel.finish()                                   # the peer has released every bucket

Double-buffered: a sender fills one bucket while another is under way, a receiver uses one while the
next arrives. Every wait has a deadline; a peer that dies, stalls or never comes is an error that
names the peer and the bucket.

Security: both sides prove that they know the endpoint's nonce (HMAC-SHA-256 over fresh challenges)
before anything else is read; any other connection is dropped and the listener goes on waiting. The
nonce must travel by a private way. Not protected: payload is neither encrypted nor authenticated
on the wire (compare digests of it), and who can inject packets between the hosts, or reach the
group's own port in the moment in which it opens, can break a transfer. Use a private network.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from secrets import token_hex

from hybridflow.weight_sync.pairs import link as links
from hybridflow.weight_sync.pairs.link import (
    Deadline,
    Endpoint,
    Link,
    PairError,
    PairTimeout,
)
from hybridflow.weight_sync.pairs.stream import PairChannel

DEFAULT_BUCKET = 512 << 20


class Listener:
    """Waits for peers on `host` alone (loopback unless told otherwise); `port` 0 takes a free one.

    One listener takes the peers of many streams, and those of the next version as well.

    Attributes:
        endpoint: what a peer needs to come.
        refused: how many connections did not know the nonce.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        self.endpoint = Endpoint(host, self._socket.getsockname()[1], token_hex(32))
        self.refused = 0

    def accept(
        self,
        streams: Iterable[str],
        timeout: float,
        *,
        bucket: int = DEFAULT_BUCKET,
    ) -> dict[str, PairChannel]:
        """The channel of each named stream, once all their peers have come.

        `timeout` (s) bounds this call and becomes the deadline of each wait of the channels;
        `bucket` (bytes) bounds what a channel takes at once.

        Raises:
            PairTimeout: names the streams that are missing.
            PairError: a peer with the right nonce went wrong.
        """
        missing, channels = list(streams), {}
        until = Deadline(timeout)
        try:
            while missing:
                link = self._next_peer(until, missing)
                if link is None:
                    continue
                stream = link.hello.get("stream", "")
                if stream not in missing:
                    link.fail(f"stream {stream!r} is not awaited here")
                    continue
                link.send(links.CONSENT)
                channels[stream] = PairChannel(link, 0, stream, timeout, bucket, until)
                missing.remove(stream)
        except BaseException:
            for channel in channels.values():
                channel.close()
            raise
        return channels

    def _next_peer(self, until: Deadline, missing: list[str]) -> Link | None:
        """The next connection's link; None for one that does not know the nonce."""
        self._socket.settimeout(until.left())
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            also = f"; {self.refused} connections were refused" if self.refused else ""
            raise PairTimeout(
                f"no peer came for {', '.join(missing)} at {self.endpoint.host}:"
                f"{self.endpoint.port} within {until.seconds:.0f} s{also}"
            ) from None
        try:
            return links.welcome(connection, self.endpoint.nonce)
        except (OSError, ValueError, PairError):
            connection.close()
            self.refused += 1
            return None

    def close(self) -> None:
        """Wait for nobody any more; open channels stay."""
        self._socket.close()


def connect(
    endpoint: Endpoint,
    stream: str,
    timeout: float,
    *,
    bucket: int = DEFAULT_BUCKET,
) -> PairChannel:
    """Join `stream` of the listener at `endpoint`, which may start up to `timeout` seconds later.

    Raises:
        PairTimeout: nobody listened, or the listener did not go on, within `timeout`.
        PairError: the listener refused, or is not the one that made the endpoint.
    """
    until = Deadline(timeout)
    where = f"stream {stream!r} at {endpoint.host}:{endpoint.port}"
    link = None
    try:
        link = Link(links.dial(endpoint, until), {"stream": stream})
        links.introduce(link, endpoint.nonce, until)
        link.receive(until)  # the listener's consent, or why not
    except (OSError, PairError) as error:
        if link is not None:
            link.close()
        if isinstance(error, PairError):
            raise type(error)(f"{where}: {error}") from None
        raise PairError(
            f"{where}: the listener refused this connection ({error}): its nonce is another one "
            "(an endpoint that is out of date?)"
        ) from None
    return PairChannel(link, 1, stream, timeout, bucket, until)
