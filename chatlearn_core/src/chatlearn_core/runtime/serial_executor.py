"""A thread of its own for one role: blocking calls run there in order, with a timeout that tells where it hangs."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ChatLearnError, WorkerPlace
from chatlearn_core.runtime.health import health_words

T = TypeVar("T")


class SerialExecutor:
    """Runs blocking calls one after the other in a daemon thread, so that a call that never returns cannot keep the
    process from ending.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.health: Callable[[], str | None] | None = None
        """What the backend says of itself when a call failed or has no answer; None: it is not set up."""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"executor-{name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
        self._ended.set()

    async def run(
        self,
        method: str,
        function: Callable[..., T],
        /,
        *args: Any,
        timeout_s: float | None = None,
        setting: str | None = None,
    ) -> T:
        """Call ``function(*args)`` in this executor and wait for the result.

        Args:
            timeout_s: of this call; the executor's by default.
            setting: the key that bounds this call, for messages; the role's ``timeout_s`` by default.

        Raises:
            BackendTimeoutError: no answer within the timeout; carries the stack of the thread that hangs.
            BackendError: the call raised something else than one of ChatLearn's own errors, a ``SystemExit`` included.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]  # no error, so there is a result

        def call() -> None:
            result: T | None = None
            failure: BaseException | None = None
            try:
                result = function(*args)
            except ChatLearnError as error:
                failure = self._with_health(error)
            except BaseException as error:
                # Wrapped here: a future takes no StopIteration, and a SystemExit in it would end the event loop.
                failure = BackendError(f"role {self.name!r}: {method} failed: {type(error).__name__}: {error}").at(
                    WorkerPlace(self.name, method=method), traceback.format_exc()
                )
                failure.__cause__ = error
                self._with_health(failure)
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, failure)

        limit = self.timeout_s if timeout_s is None else timeout_s
        self._calls.put(call)
        try:
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the result.
            async with asyncio.timeout(limit):
                return await future
        except TimeoutError:
            stack = self.stack()
            words = "" if self.health is None else f"{health_words(self.health())} "
            raise BackendTimeoutError(
                f"role {self.name!r}: {method} did not return within {limit:g} s "
                f"({setting or f'roles.{self.name}.timeout_s'}). {words}It hangs here:\n{stack}"
            ).at(WorkerPlace(self.name, method=method), stack) from None

    def _with_health(self, error: BaseException) -> BaseException:
        """The error of a call that failed, with what the backend says of itself, if something is wrong with it."""
        problem = None if self.health is None else self.health()
        if problem is not None and problem not in str(error):
            error.args = (f"{error}\n{health_words(problem)}",)
        return error

    def stack(self) -> str:
        """Where the thread is now."""
        frame = sys._current_frames().get(self._thread.ident or -1)
        return "".join(traceback.format_stack(frame)) if frame else "  (the thread has ended)"

    def stop(self, wait_s: float = 0.0) -> bool:
        """Let the thread end after the calls that are queued.

        Args:
            wait_s: how long to wait for that; blocks.

        Returns:
            Whether the thread is done with its calls.
        """
        self._calls.put(None)
        return self._ended.wait(wait_s)
