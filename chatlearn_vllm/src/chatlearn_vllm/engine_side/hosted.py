"""The driver as ``chatlearn_hosting`` calls it from another process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .driver import EngineDriver, Event
from .lockstep import LockstepDriver


class HostedDriver:
    """One driver; its events go to the host."""

    def __init__(self, in_lockstep: bool) -> None:
        """Make the driver.

        Args:
            in_lockstep: whether the engine is one rank of several that are data-parallel.
        """
        self._emit: Callable[[Event], None] | None = None
        self._driver = (LockstepDriver if in_lockstep else EngineDriver)(self._pass_on)

    async def listen(self, emit: Callable[[Event], None]) -> None:
        """Pass events on until the caller gives up."""
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
