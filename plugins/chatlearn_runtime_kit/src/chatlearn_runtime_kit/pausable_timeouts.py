"""Timeouts that can be paused together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PausableTimeouts:
    """Makes timeouts that all stop between ``pause`` and ``resume``."""

    def __init__(self) -> None:
        self._left_s: dict[asyncio.Timeout, float] = {}
        """Remaining time of each open timeout when it started or was last paused, seconds."""
        self._are_paused = False

    @asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """Like ``asyncio.timeout(seconds)``, but paused time does not count.

        Raises:
            TimeoutError: the time has passed; it was this timeout if ``expired`` of the yielded object is true.
        """
        async with asyncio.timeout(None) as timeout:
            self._left_s[timeout] = seconds
            if not self._are_paused:
                self._start(timeout)
            try:
                yield timeout
            finally:
                del self._left_s[timeout]

    def pause(self) -> None:
        """Stop all timeouts, including those made from now on. Safe to call twice."""
        self._are_paused = True
        now = asyncio.get_running_loop().time()
        for timeout in self._left_s:
            end = timeout.when()
            if end is not None and not timeout.expired():
                self._left_s[timeout] = max(0.0, end - now)
                timeout.reschedule(None)

    def resume(self) -> None:
        """Restart all timeouts with their remaining time."""
        self._are_paused = False
        for timeout in self._left_s:
            if timeout.when() is None:
                self._start(timeout)

    def _start(self, timeout: asyncio.Timeout) -> None:
        timeout.reschedule(asyncio.get_running_loop().time() + self._left_s[timeout])
