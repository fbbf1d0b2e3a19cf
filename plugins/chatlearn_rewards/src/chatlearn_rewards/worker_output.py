"""Forwards the output of a pool's workers to stderr, limited per item and in total, without control characters."""

from __future__ import annotations

import codecs
import sys
import threading
from contextlib import suppress

from chatlearn_core.printable import printable

MAX_ITEM_BYTES = 16 << 10
MAX_POOL_BYTES = 16 << 20
"""Limit of a pool's output in bytes; one line per sample stays below it except in very long runs."""


class PoolOutput:
    """The output of all workers of a pool.

    Args:
        name: name of the pool, which begins messages about omitted output.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._left = MAX_POOL_BYTES
        self._bytes_left_out = 0
        self._told = False

    def take(self, data: bytes, text: str) -> None:
        """Forward ``text``, which is the decoded ``data``, if the pool's limit allows it."""
        with self._lock:
            fits = len(data) <= self._left
            self._left -= len(data) if fits else 0
        if fits:
            _write(printable(text.replace("\r\n", "\n").replace("\r", "\n")))
        else:
            self.leave_out(len(data))

    def leave_out(self, num_bytes: int) -> None:
        """Count omitted bytes; print a message the first time."""
        with self._lock:
            self._bytes_left_out += num_bytes
            told, self._told = self._told, True
        if not told:
            self.say(
                f"omitting the output of its workers beyond {MAX_ITEM_BYTES >> 10} KiB a sample and "
                f"{MAX_POOL_BYTES >> 20} MiB in all"
            )

    def say(self, sentence: str) -> None:
        """Print a sentence about the pool's workers on a separate line."""
        _write(f"\n{printable(self._name)}: {sentence}\n")

    def close(self) -> None:
        """Print how many bytes were omitted, if any."""
        if self._bytes_left_out:
            self.say(f"{self._bytes_left_out} bytes of output of its workers were omitted")
            self._bytes_left_out = 0


class WorkerOutput:
    """The output of one worker."""

    def __init__(self, pool: PoolOutput) -> None:
        self._pool = pool
        self._left = MAX_ITEM_BYTES
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def begin_item(self) -> None:
        """Reset the item's limit, because the worker begins another item."""
        self._left = MAX_ITEM_BYTES

    def take(self, data: bytes) -> None:
        """Forward printed bytes up to the item's limit."""
        shown = data[: self._left]
        self._left -= len(shown)
        if shown:
            self._pool.take(shown, self._decoder.decode(shown))
        if len(shown) < len(data):
            self._pool.leave_out(len(data) - len(shown))


def _write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # stderr is full, closed or absent, and there is no other place
        sys.stderr.write(text)
        sys.stderr.flush()
