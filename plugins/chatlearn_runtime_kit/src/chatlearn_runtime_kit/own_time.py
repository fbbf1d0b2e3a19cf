"""A timeout that pauses while other roles are awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import TypeVar

from chatlearn_core.exceptions import RoleLostError

T = TypeVar("T")


class OwnTime:
    """A timeout for the time that an environment or a reward spends itself. The roles that it calls have their own
    timeouts.

    Args:
        seconds: the timeout, not counting waits.
    """

    def __init__(self, seconds: float) -> None:
        self.limit = asyncio.timeout(seconds)
        self.over = False
        """Set when the block of ``limit`` is left."""
        self.lost: list[RoleLostError] = []
        """Errors of waits that must end the run, even if the caller ignores them."""
        self._left = seconds
        self._num_waiting = 0

    async def without(self, answer: Awaitable[T]) -> T:
        """Await another role's answer while the timeout is paused."""
        now = asyncio.get_running_loop().time
        if not self._num_waiting and not self.over and (end := self.limit.when()) is not None:
            self._left = end - now()
            self.limit.reschedule(None)
        self._num_waiting += 1
        try:
            return await answer
        except RoleLostError as error:
            self.lost.append(error)
            raise
        finally:
            self._num_waiting -= 1
            if not self._num_waiting and not self.over:
                self.limit.reschedule(now() + self._left)


CURRENT: ContextVar[OwnTime | None] = ContextVar("CURRENT", default=None)
"""The timeout of the reward call that the current task belongs to."""
