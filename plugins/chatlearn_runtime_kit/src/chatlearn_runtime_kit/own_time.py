"""A time limit that stands still while other roles are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import TypeVar

from chatlearn_core.exceptions import RoleLostError

T = TypeVar("T")


class OwnTime:
    """A limit of the time that an environment or a reward takes itself. The roles that it calls have limits of their
    own.

    Args:
        seconds: how long ``limit`` lasts without the waits.
    """

    def __init__(self, seconds: float) -> None:
        self.limit = asyncio.timeout(seconds)
        self.over = False
        """Set when ``limit`` is left."""
        self.lost: list[RoleLostError] = []
        """What waits ended with that ends the run, whatever the caller makes of it."""
        self._left = seconds
        self._num_waiting = 0

    async def without(self, answer: Awaitable[T]) -> T:
        """Await what another role answers."""
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
"""Of the call of a reward that this task belongs to."""
