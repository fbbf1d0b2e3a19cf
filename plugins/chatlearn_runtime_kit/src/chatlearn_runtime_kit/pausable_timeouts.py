"""Timeouts that stand still while what they wait for is paused on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PausableTimeouts:
    """Makes timeouts of which none runs between ``pause`` and ``resume``."""

    def __init__(self) -> None:
        self._left_s: dict[asyncio.Timeout, float] = {}
        """What each open timeout had left when it began, or when it was paused last."""
        self._are_paused = False

    @asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """``asyncio.timeout(seconds)``, in which only time counts that is not paused.

        Raises:
            TimeoutError: so many seconds have passed in the block; its own if ``expired`` of what is yielded is true.
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
        """Stop all timeouts, those that are made from now on too. Twice is fine."""
        self._are_paused = True
        now = asyncio.get_running_loop().time()
        for timeout in self._left_s:
            end = timeout.when()
            if end is not None and not timeout.expired():
                self._left_s[timeout] = max(0.0, end - now)
                timeout.reschedule(None)

    def resume(self) -> None:
        """Let them go on with what they had left."""
        self._are_paused = False
        for timeout in self._left_s:
            if timeout.when() is None:
                self._start(timeout)

    def _start(self, timeout: asyncio.Timeout) -> None:
        timeout.reschedule(asyncio.get_running_loop().time() + self._left_s[timeout])
