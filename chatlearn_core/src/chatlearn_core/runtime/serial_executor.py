"""A thread per role that runs blocking calls in order, with a timeout that reports where a call hangs."""

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
    """Runs blocking calls one after another in a daemon thread, so that a call that never returns does not keep the
    process alive.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.health: Callable[[], str | None] | None = None
        """Returns the backend's own problem after a call failed or hung; None: the backend is not set up."""
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
            timeout_s: timeout of this call, seconds; by default the executor's.
            setting: the configuration key of this timeout, for messages; by default the role's ``timeout_s``.

        Raises:
            BackendTimeoutError: no result within the timeout; contains the stack of the hanging thread.
            BackendError: the call raised an exception other than ChatLearn's own errors, including ``SystemExit``.
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
                # Wrapped here: a future rejects StopIteration, and SystemExit in it would end the event loop.
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
            # Not wait_for: in Python 3.11 it loses a cancellation that coincides with the result.
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
        """The error of a failed call, extended by the backend's own problem, if it reports one."""
        problem = None if self.health is None else self.health()
        if problem is not None and problem not in str(error):
            error.args = (f"{error}\n{health_words(problem)}",)
        return error

    def stack(self) -> str:
        """The thread's current stack."""
        frame = sys._current_frames().get(self._thread.ident or -1)
        return "".join(traceback.format_stack(frame)) if frame else "  (the thread has ended)"

    def stop(self, wait_s: float = 0.0) -> bool:
        """End the thread after the queued calls.

        Args:
            wait_s: maximum time to wait for that, seconds; blocks.

        Returns:
            Whether the thread has finished its calls.
        """
        self._calls.put(None)
        return self._ended.wait(wait_s)
