"""Runs blocking calls of tools in threads, and bounds the number of those that never end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from chatlearn_core.protocols import ToolError

MAX_ABANDONED = 16
"""Threads of one tool that may still run after their calls timed out; Python cannot end a thread."""
ResultT = TypeVar("ResultT")


class ToolThreads:
    """Runs each call in a daemon thread of its own.

    Args:
        name: of the tool, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._abandoned: list[threading.Thread] = []

    async def run(self, function: Callable[[], ResultT]) -> ResultT:
        """Return what the function returns, or raise what it raises. A cancelled call leaves its thread behind.

        Raises:
            ToolError: too many threads of earlier calls still run.
        """
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= MAX_ABANDONED:
            raise ToolError(f"{self._name} is not available: {len(self._abandoned)} earlier calls have not ended")
        here = asyncio.get_running_loop()
        done: asyncio.Future[ResultT] = here.create_future()

        def finish(result: ResultT | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(result)  # type: ignore[arg-type]  # a result is there unless an error is
            else:
                done.set_exception(error)

        def work() -> None:
            result, error = None, None
            try:
                result = function()
            except BaseException as raised:  # also SystemExit of a user's function, which must not vanish here
                error = raised if isinstance(raised, Exception) else RuntimeError(f"{type(raised).__name__}: {raised}")
            with contextlib.suppress(RuntimeError):  # the environment was closed meanwhile
                here.call_soon_threadsafe(finish, result, error)

        thread = threading.Thread(target=work, name=f"tool {self._name}", daemon=True)
        thread.start()
        try:
            return await done
        except asyncio.CancelledError:
            self._abandoned.append(thread)
            raise
