"""Hosts of an engine's driver, called from an event loop: in this process, or in another one."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, Protocol

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, HostedCallError
from chatlearn_hosting import HostedProcess
from chatlearn_vllm.engine_side.driver import EngineDriver, Event

OnEvent = Callable[[Event], None]


class EngineHost(Protocol):
    """The driver of one engine, wherever it runs. Calls take effect in call order."""

    @property
    def shares_memory(self) -> bool:
        """Whether arguments, including tensors, reach the driver without serialisation."""

    @property
    def lost(self) -> str | None:
        """Why the engine can no longer be called, as far as is known without waiting; None while it can."""

    def start(self, arguments: Mapping[str, Any], *, log_level: str, num_threads: int | None) -> dict[str, Any]:
        """Start the engine, wait for it, and return ``Engine.facts``."""

    def listen(self, on_event: OnEvent) -> None:
        """Deliver events on the running event loop from now on."""

    def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Submit requests without waiting."""

    def drop(self, keys: Sequence[int]) -> None:
        """Abort requests without waiting."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of ``EngineDriver`` and wait for its result.

        Raises:
            HostedCallError: the method raised.
            BackendError: the engine or its process is gone.
        """

    def call_blocking(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Like ``call``, but blocks the calling thread.

        Raises:
            BackendTimeoutError: the call took longer than ``timeout_s`` seconds.
        """

    def close(self) -> None:
        """End the engine. A repeated call does nothing."""


class InProcessHost:
    """Host that runs the driver's thread in this process."""

    def __init__(self, name: str, start_timeout_s: float) -> None:
        self._name = name
        self._start_timeout_s = start_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_event: OnEvent | None = None
        self._driver = EngineDriver(self._pass_on)

    @property
    def shares_memory(self) -> bool:
        """See ``EngineHost``."""
        return True

    @property
    def lost(self) -> str | None:
        """See ``EngineHost``."""
        return None if self._driver.dead is None else f"the engine died: {self._driver.dead}"

    def start(self, arguments: Mapping[str, Any], *, log_level: str, num_threads: int | None) -> dict[str, Any]:
        """See ``EngineHost``."""
        facts: dict[str, Any] = self.call_blocking(
            "start", arguments, log_level, num_threads, timeout_s=self._start_timeout_s
        )
        return facts

    def listen(self, on_event: OnEvent) -> None:
        """See ``EngineHost``."""
        self._loop, self._on_event = asyncio.get_running_loop(), on_event

    def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """See ``EngineHost``."""
        self._driver.submit(requests)

    def drop(self, keys: Sequence[int]) -> None:
        """See ``EngineHost``."""
        self._driver.drop(keys)

    async def call(self, method: str, *arguments: Any) -> Any:
        """See ``EngineHost``."""
        future: Future[Any] = getattr(self._driver, method)(*arguments)
        try:
            return await asyncio.wrap_future(future)
        except Exception as error:
            raise self._error(method, error) from error

    def call_blocking(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """See ``EngineHost``."""
        future: Future[Any] = getattr(self._driver, method)(*arguments)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError as error:
            if future.done():
                raise self._error(method, error) from error
            raise BackendTimeoutError(f"{self._name}: {method} took longer than {timeout_s:g} s") from None
        except Exception as error:
            raise self._error(method, error) from error

    def close(self) -> None:
        """See ``EngineHost``."""
        self._driver.close()

    def _pass_on(self, event: Event) -> None:
        loop, on_event = self._loop, self._on_event
        if loop is None or on_event is None or loop.is_closed():
            return  # no call was made yet, or the caller's event loop has ended
        loop.call_soon_threadsafe(on_event, event)

    def _error(self, method: str, error: Exception) -> HostedCallError:
        found = HostedCallError(f"{self._name}: {method} failed: {type(error).__name__}: {error}")
        found.type_name, found.text = type(error).__name__, str(error)
        found.add_note("In the engine's thread:\n" + "".join(traceback.format_exception(error)[-4:]))
        return found


class ChildHost:
    """Host that runs the driver in its own process, under this interpreter or another."""

    def __init__(
        self,
        name: str,
        start_timeout_s: float,
        *,
        python: str | None,
        environment: Mapping[str, str | None],
        in_lockstep: bool = False,
    ) -> None:
        """Store the settings; ``start`` starts the process.

        Args:
            name: name for messages.
            start_timeout_s: longest time in seconds that the process, and then the engine, may take to start.
            python: interpreter of the process; None uses this one.
            environment: variables to set in addition to this process's own; None unsets one.
            in_lockstep: whether the engine is one rank of a data-parallel engine.
        """
        self._start_timeout_s = start_timeout_s
        self._tasks: set[asyncio.Task[Any]] = set()
        self.process = HostedProcess(
            name,
            package="chatlearn_vllm.engine_side",
            factory="chatlearn_vllm.engine_side.hosted:HostedDriver",
            arguments={"in_lockstep": in_lockstep},
            python=python,
            environment=environment,
        )

    @property
    def shares_memory(self) -> bool:
        """See ``EngineHost``."""
        return False

    @property
    def lost(self) -> str | None:
        """See ``EngineHost``."""
        if self.process.lost is None:
            return None
        return f"the engine died: {self.process.lost}\nIts last output:\n{self.process.last_output()}"

    def start(self, arguments: Mapping[str, Any], *, log_level: str, num_threads: int | None) -> dict[str, Any]:
        """See ``EngineHost``."""
        self.process.start(self._start_timeout_s)
        facts: dict[str, Any] = self.call_blocking(
            "start", dict(arguments), log_level, num_threads, timeout_s=self._start_timeout_s
        )
        return facts

    def listen(self, on_event: OnEvent) -> None:
        """See ``EngineHost``. The loss of the process is reported as an event too."""

        async def listen() -> None:
            try:
                await self.process.acall("listen", on_event=on_event)
            except BackendError as error:
                on_event(("dead", str(error), None))

        self._spawn(listen())

    def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """See ``EngineHost``."""
        self._send("submit", requests)

    def drop(self, keys: Sequence[int]) -> None:
        """See ``EngineHost``."""
        self._send("drop", keys)

    async def call(self, method: str, *arguments: Any) -> Any:
        """See ``EngineHost``."""
        # As a task, so that it starts after earlier calls.
        return await asyncio.create_task(self.process.acall("do", method, *arguments))

    def call_blocking(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """See ``EngineHost``."""
        return self.process.call("do", method, *arguments, timeout_s=timeout_s)

    def close(self) -> None:
        """See ``EngineHost``."""
        self.process.close()

    def _send(self, method: str, argument: Any) -> None:
        async def send() -> None:
            with suppress(BackendError):  # ``listen`` reports that the engine or its process is gone
                await self.process.acall("do", method, argument)

        self._spawn(send())

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
