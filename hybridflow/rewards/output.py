"""What rewards print, brought to this process's stderr: the first of each batch, and no more.

A reward that prints a line for each sample would fill a disk within a long run.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import sys
import threading

SHOWN_BYTES = 1 << 16
"""Of what is printed while a batch is scored, or while the reward loads."""

_PIECE_BYTES = 1 << 16


class Output:
    """Reads a pipe to its end, so that whoever prints never waits; ``fd`` is its writing end.

    It has a thread of its own until ``close``.
    """

    def __init__(self) -> None:
        self._read, self.fd = os.pipe()
        self._over = os.eventfd(0)
        self._lock = threading.Lock()
        self._left, self._hidden = SHOWN_BYTES, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._thread = threading.Thread(target=self._run, name="reward-output", daemon=True)

    def start(self) -> None:
        """Once the writing end is with the process that prints."""
        os.close(self.fd)
        self._thread.start()

    def renew(self) -> None:
        """A new batch: as much is shown again."""
        with self._lock:
            self._tell_hidden()
            self._left = SHOWN_BYTES

    def close(self) -> None:
        """Show what has been printed until now, and read no more."""
        os.eventfd_write(self._over, 1)
        self._thread.join()
        os.close(self._read)
        os.close(self._over)
        with self._lock:
            self._tell_hidden()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        poll.register(self._over, select.POLLIN)
        over = False
        while not over:
            ready = dict(poll.poll())
            over = self._over in ready  # then once more: a pipe holds no more than a piece
            if ready.get(self._read, 0) & select.POLLIN:
                self._show(os.read(self._read, _PIECE_BYTES))
            elif self._read in ready:
                return  # everyone who could print has ended

    def _show(self, piece: bytes) -> None:
        with self._lock:
            shown = piece[: self._left]
            self._left -= len(shown)
            self._hidden += len(piece) - len(shown)
            if shown:
                _write(printable(self._decoder.decode(shown)))

    def _tell_hidden(self) -> None:
        if self._hidden:
            _write(f"\n[{self._hidden:,} more bytes of what the reward printed are left out]\n")
            self._hidden = 0


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a log that is full or closed stops no scoring
        sys.stderr.write(text)
        sys.stderr.flush()


def printable(text: str) -> str:
    """The text with the characters that would spoil a log spelled out."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
