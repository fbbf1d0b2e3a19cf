"""A call of all ranks of a data-parallel engine, and what they have answered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class JointCall:
    """One call. Answers may come from any thread."""

    def __init__(self, method: str, num_ranks: int) -> None:
        """No rank has answered."""
        self.method = method
        self._missing = set(range(num_ranks))
        self.results: dict[int, Any] = {}
        self.future: Future[dict[int, Any]] = Future()
        """Results by rank, once all have answered."""
        self.future.set_running_or_notify_cancel()  # it cannot be cancelled: the ranks have it
        self._patience: threading.Timer | None = None
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def missing(self) -> list[int]:
        """Ranks that have not answered."""
        with self._lock:
            return sorted(self._missing)

    def take(self, rank: int, error: BaseException | None, *, explains_most: bool) -> tuple[bool, BaseException | None]:
        """Note that a rank has answered.

        Args:
            rank: which.
            error: why it failed; None if it did not.
            explains_most: whether that is to be told rather than what came before; else what came first is.

        Returns: whether it is the last; why the call fails, as far as is known.
        """
        with self._lock:
            self._missing.discard(rank)
            if error is not None and (self._failure is None or explains_most):
                self._failure = error
            if not self._missing and self._patience is not None:
                self._patience.cancel()
            return not self._missing, self._failure

    def be_patient(self, limit_s: float, then: Callable[[], None]) -> None:
        """Call ``then`` if ranks do not answer within ``limit_s``; the first limit holds."""
        with self._lock:
            if self._missing and self._patience is None:
                self._patience = threading.Timer(limit_s, then)
                self._patience.daemon = True
                self._patience.start()
