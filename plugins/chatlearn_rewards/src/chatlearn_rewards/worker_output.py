"""What the workers of a pool print, passed on to stderr: so much of an item, so much in all, and nothing that a
terminal obeys.
"""

from __future__ import annotations

import codecs
import sys
import threading
from contextlib import suppress

from chatlearn_core.printable import printable

MAX_ITEM_BYTES = 16 << 10
MAX_POOL_BYTES = 16 << 20
"""A function that prints a line for each sample stays below it in all but the longest runs."""


class PoolOutput:
    """The output of all workers of a pool.

    Args:
        name: of the pool, leads sentences about what was left out.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._left = MAX_POOL_BYTES
        self._bytes_left_out = 0
        self._told = False

    def take(self, data: bytes, text: str) -> None:
        """Pass on ``text``, which is ``data`` decoded, as far as the pool may."""
        with self._lock:
            fits = len(data) <= self._left
            self._left -= len(data) if fits else 0
        if fits:
            _write(printable(text.replace("\r\n", "\n").replace("\r", "\n")))
        else:
            self.leave_out(len(data))

    def leave_out(self, num_bytes: int) -> None:
        """Count what is not shown; the first time it is said."""
        with self._lock:
            self._bytes_left_out += num_bytes
            told, self._told = self._told, True
        if not told:
            self.say(
                f"what its workers print is left out beyond {MAX_ITEM_BYTES >> 10} KiB a sample and "
                f"{MAX_POOL_BYTES >> 20} MiB in all"
            )

    def say(self, sentence: str) -> None:
        """A sentence about the pool's workers, on a line of its own."""
        _write(f"\n{printable(self._name)}: {sentence}\n")

    def close(self) -> None:
        """Say how much was left out."""
        if self._bytes_left_out:
            self.say(f"{self._bytes_left_out} bytes that its workers printed were left out")
            self._bytes_left_out = 0


class WorkerOutput:
    """The output of one worker."""

    def __init__(self, pool: PoolOutput) -> None:
        self._pool = pool
        self._left = MAX_ITEM_BYTES
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def begin_item(self) -> None:
        """The worker begins another item, which may print as much as the one before."""
        self._left = MAX_ITEM_BYTES

    def take(self, data: bytes) -> None:
        """What was printed."""
        shown = data[: self._left]
        self._left -= len(shown)
        if shown:
            self._pool.take(shown, self._decoder.decode(shown))
        if len(shown) < len(data):
            self._pool.leave_out(len(data) - len(shown))


def _write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # it is full, closed or none: there is no other place
        sys.stderr.write(text)
        sys.stderr.flush()
