"""The stacks of a hosted process's threads, requested by a signal and read from anonymous memory."""

from __future__ import annotations

import os
import signal
import threading
import time

_TIMEOUT_S = 5.0
_POLL_S = 0.1
"""Interval in seconds; the stacks are complete when the file has not grown during one."""


class StackFile:
    """Memory that a process inherits and to which it writes its stacks on a signal."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("chatlearn-stacks")
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return str(self.descriptor)

    def ask(self, pid: int, number: signal.Signals) -> str:
        """Return the stacks of a process that has registered for the signal.

        The result is empty if the process writes nothing within 5 s, or has ended and this file is closed.
        """
        with self._lock:
            if self.descriptor < 0:
                return ""
            # Another thread may close the file meanwhile.
            descriptor = os.dup(self.descriptor)
            start = size = os.fstat(descriptor).st_size
            os.kill(pid, number)
        try:
            deadline = time.monotonic() + _TIMEOUT_S
            while time.monotonic() < deadline:
                time.sleep(_POLL_S)
                before, size = size, os.fstat(descriptor).st_size
                if size > start and size == before:
                    break
            return os.pread(descriptor, size - start, start).decode(errors="replace").strip()
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Free the memory. A repeated call does nothing."""
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1
