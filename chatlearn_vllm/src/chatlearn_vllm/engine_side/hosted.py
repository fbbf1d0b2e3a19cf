"""Adapts the driver to ``chatlearn_hosting``, which calls it from another process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .driver import EngineDriver, Event
from .lockstep import LockstepDriver


class HostedDriver:
    """One driver whose events go to the hosting process."""

    def __init__(self, in_lockstep: bool) -> None:
        """Create the driver.

        Args:
            in_lockstep: whether the engine is one of several data-parallel ranks.
        """
        self._emit: Callable[[Event], None] | None = None
        self._driver = (LockstepDriver if in_lockstep else EngineDriver)(self._pass_on)

    async def listen(self, emit: Callable[[Event], None]) -> None:
        """Forward events until the caller cancels."""
        self._emit = emit
        await asyncio.Event().wait()

    async def do(self, method: str, *arguments: Any) -> Any:
        """Call a method of the driver and wait for its result."""
        result = getattr(self._driver, method)(*arguments)
        return await asyncio.wrap_future(result) if isinstance(result, Future) else result

    def close(self) -> None:
        """End the engine."""
        self._driver.close()

    def _pass_on(self, event: Event) -> None:
        if self._emit is not None:
            self._emit(event)
