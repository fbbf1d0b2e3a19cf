"""A call to all ranks of a data-parallel engine, with their answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class JointCall:
    """One call. Answers may come from any thread."""

    def __init__(self, method: str, num_ranks: int) -> None:
        """Start without answers."""
        self.method = method
        self._missing = set(range(num_ranks))
        self.results: dict[int, Any] = {}
        self.future: Future[dict[int, Any]] = Future()
        """Results by rank; completes when all ranks have answered."""
        self.future.set_running_or_notify_cancel()  # cannot be cancelled: the ranks have received it
        self._timer: threading.Timer | None = None
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def missing(self) -> list[int]:
        """Ranks that have not answered."""
        with self._lock:
            return sorted(self._missing)

    def take(self, rank: int, error: BaseException | None, *, explains_most: bool) -> tuple[bool, BaseException | None]:
        """Record the answer of a rank.

        Args:
            rank: the rank's number.
            error: why the call failed there; None if it succeeded.
            explains_most: whether this error replaces an earlier one; by default the call reports the first error.

        Returns: whether this was the last answer, and the error of the call so far or None.
        """
        with self._lock:
            self._missing.discard(rank)
            if error is not None and (self._failure is None or explains_most):
                self._failure = error
            if not self._missing and self._timer is not None:
                self._timer.cancel()
            return not self._missing, self._failure

    def limit_wait(self, limit_s: float, then: Callable[[], None]) -> None:
        """Call ``then`` if ranks have not answered within ``limit_s`` seconds. Only the first call sets the limit."""
        with self._lock:
            if self._missing and self._timer is None:
                self._timer = threading.Timer(limit_s, then)
                self._timer.daemon = True
                self._timer.start()
