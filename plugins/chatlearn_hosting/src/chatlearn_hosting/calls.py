"""Open calls to another process; each is answered on the event loop or thread that made it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from chatlearn_core.exceptions import BackendError, HostedCallError
from chatlearn_hosting.engine_side.wire import Message

OnEvent = Callable[[Any], None]


@dataclass(slots=True, eq=False)
class Call:
    """One open call."""

    number: int
    method: str
    future: asyncio.Future[Any] | Future[Any]
    loop: asyncio.AbstractEventLoop | None
    """Event loop of the future; None if a thread blocks on it."""
    on_event: OnEvent | None


class Calls:
    """All open calls to one process. The link's thread delivers answers, and wakes each event loop once per batch."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: dict[int, Call] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._lost: Callable[[str], BackendError] | None = None

    def __len__(self) -> int:
        return len(self._open)

    def add(
        self, method: str, *, loop: asyncio.AbstractEventLoop | None = None, on_event: OnEvent | None = None
    ) -> Call:
        """Register a call before it is sent.

        Raises:
            BackendError: the process is gone.
        """
        future: asyncio.Future[Any] | Future[Any]
        if loop is None:
            future = Future()
            future.set_running_or_notify_cancel()  # a call that was sent cannot be cancelled
        else:
            future = loop.create_future()
        with self._lock:
            if self._lost is not None:
                raise self._lost(method)
            call = Call(next(self._numbers), method, future, loop, on_event)
            self._open[call.number] = call
        return call

    def drop(self, call: Call) -> bool:
        """Stop waiting for a call. Returns whether it was still unanswered."""
        with self._lock:
            return self._open.pop(call.number, None) is not None

    def deliver(self, messages: Iterable[Message]) -> None:
        """Deliver results, errors and events to their calls, in order."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Call, str, Message]]] = {}
        for kind, number, *content in messages:
            with self._lock:
                call = self._open.get(number) if kind == "event" else self._open.pop(number, None)
            if call is None:
                continue  # the call no longer waits
            if call.loop is None:
                self._settle(call, kind, tuple(content))
            else:
                by_loop.setdefault(call.loop, []).append((call, kind, tuple(content)))
        for loop, batch in by_loop.items():
            _on_loop(loop, self._settle_all, batch)

    def fail_all(self, lost: Callable[[str], BackendError]) -> None:
        """Fail every open and every later call with ``lost(method)``, because the process is gone. Keeps the first
        reason.
        """
        with self._lock:
            if self._lost is None:
                self._lost = lost
            calls, self._open = list(self._open.values()), {}
        for call in calls:
            error = self._lost(call.method)
            if call.loop is None:
                _fail(call, error)
            else:
                _on_loop(call.loop, _fail, call, error)

    def _settle_all(self, batch: list[tuple[Call, str, Message]]) -> None:
        for call, kind, content in batch:
            self._settle(call, kind, content)

    def _settle(self, call: Call, kind: str, content: Message) -> None:
        if call.future.done():
            return
        if kind == "result":
            call.future.set_result(content[0])
        elif kind == "error":
            type_name, text, trace = content
            error = HostedCallError(f"{self._name}: {call.method} failed: {type_name}: {text}")
            error.type_name, error.text = type_name, text
            error.add_note(f"In the hosted process:\n{trace}")
            call.future.set_exception(error)
        elif call.on_event is not None:
            try:
                call.on_event(content[0])
            except Exception as error:  # the callback belongs to the caller, so the caller gets its error
                call.future.set_exception(error)


def _fail(call: Call, error: BackendError) -> None:
    if not call.future.done():
        call.future.set_exception(error)


def _on_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        # The call ended with its event loop.
