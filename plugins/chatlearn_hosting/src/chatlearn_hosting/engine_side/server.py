"""The hosted end: builds one object and answers calls to its methods on an event loop.

Public methods can be called, plain functions and coroutines; plain functions block the loop. The engine may print
anything: messages use their own socket.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import inspect
import os
import platform
import select
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .shared_files import mapped_files, remove
from .wire import Decoder, Message, encode

STACK_SIGNAL = signal.SIGUSR2
"""Signal on which this process writes the stacks of all its threads to the stack file."""
CHUNK_BYTES = 1 << 20
PONG = encode(("pong",))
PARENT_CHECK_S = 5.0
"""Interval of checks that the parent lives while the connection is silent: a process it forked may keep its
end open."""

Emit = Callable[[Any], None]


class Server:
    """Answers calls, each in its own task, started in order of arrival.

    All messages of one event-loop iteration are sent in one piece.
    """

    def __init__(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._target: Any = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._outgoing: list[bytes] = []
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        """Serialises sends of the event loop and of the reading thread."""

    def serve(self, target: Any) -> None:
        """Answer calls to ``target`` until the caller stops this process or is gone."""
        self._target = target
        self._loop.run_forever()

    def say(self, message: Message) -> None:
        """Send a message at the end of this event-loop iteration; callable from any thread.

        Raises:
            TypeError: the message contains an object that is not a plain builtin.
        """
        content = encode(message)
        with self._lock:
            self._outgoing.append(content)
            if len(self._outgoing) > 1:
                return
        if threading.get_ident() == self._loop_thread:
            self._loop.call_soon(self.flush)
        else:
            self._loop.call_soon_threadsafe(self.flush)

    def flush(self) -> None:
        """Send the queued messages."""
        with self._lock:
            outgoing, self._outgoing = self._outgoing, []
        if outgoing:
            self._send(b"".join(outgoing))

    def _send(self, data: bytes) -> None:
        with self._sending:
            self._connection.sendall(data)

    def read(self) -> None:
        """Read messages until the other end is gone; then end this process and all that it started.

        This thread answers pings itself, so that they are answered even while a method blocks the loop.
        """
        decoder, parent = Decoder(), os.getppid()
        waiting = select.poll()
        waiting.register(self._connection, select.POLLIN)
        while True:
            if not waiting.poll(PARENT_CHECK_S * 1000):
                if os.getppid() == parent:
                    continue
                break
            try:
                data = self._connection.recv(CHUNK_BYTES)
            except OSError:
                break
            if not data:
                break
            messages = decoder.feed(data)
            if ("ping",) in messages:
                messages = [message for message in messages if message != ("ping",)]
                self._send(PONG)
            if messages:
                self._loop.call_soon_threadsafe(self._take, messages)
        try:
            _remove_shared_files()
        finally:
            os.killpg(0, signal.SIGKILL)

    def _take(self, messages: list[Message]) -> None:
        for kind, *content in messages:
            if kind == "call":
                number = content[0]
                task = self._loop.create_task(self._answer(*content))
                self._tasks[number] = task
                task.add_done_callback(partial(self._forget, number))
            elif kind == "cancel":
                if content[0] in self._tasks:
                    self._tasks[content[0]].cancel()
            else:
                assert kind == "stop", kind
                self._loop.create_task(self._stop())

    def _forget(self, number: int, _: asyncio.Task[None]) -> None:
        del self._tasks[number]

    async def _answer(self, number: int, method: str, args: Any, kwargs: Any, with_events: bool) -> None:
        try:
            function = getattr(self._target, method, None)
            if method.startswith("_") or not callable(function):
                raise AttributeError(f"{type(self._target).__name__} has no method {method!r}")
            if with_events:
                kwargs = {**kwargs, "emit": lambda value: self.say(("event", number, value))}
            result = function(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
            self.say(("result", number, result))
        except asyncio.CancelledError:
            pass  # the caller cancelled the call and expects no answer
        except Exception as error:
            self.say(error_message(number, error))

    async def _stop(self) -> None:
        """Close the target and exit, whatever threads remain; helper processes end with the process group."""
        try:
            close = getattr(self._target, "close", None)
            if close is not None and inspect.isawaitable(result := close()):
                await result
        except Exception:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)


def _remove_shared_files() -> None:
    """Unlink the shared memory that only this process group has mapped."""
    members: list[int] = []
    others: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                same = os.getpgid(int(entry.name)) == os.getpgrp()
            except ProcessLookupError:
                continue
            (members if same else others).append(int(entry.name))
    remove(mapped_files(members), spare=others)


def error_message(number: int, error: BaseException) -> Message:
    """Return an exception as a message for the caller."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return ("error", number, type(error).__name__, str(error), "".join(lines))


def resolve(target: str) -> Any:
    """Import the object named by ``package.module:attribute``."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def main(connection: int, stack_file: int) -> None:
    """Serve the process that started this one.

    Args:
        connection: file descriptor of this process's end of a socket pair.
        stack_file: file descriptor to which stacks are written on ``STACK_SIGNAL``.
    """
    for descriptor in (connection, stack_file):
        os.set_inheritable(descriptor, False)
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    link = socket.socket(fileno=connection)
    server = Server(link, loop)
    server.say(("hello", platform.python_version()))
    server.flush()
    number, factory, arguments = _first_message(link)
    threading.Thread(target=server.read, name="hosted-reader", daemon=True).start()
    try:
        target = resolve(factory)(**arguments)
        if inspect.isawaitable(target):
            target = loop.run_until_complete(target)
        server.say(("result", number, None))
    except BaseException as error:
        # An engine may also raise SystemExit; the caller gets any kind of error.
        server.say(error_message(number, error))
        server.flush()
        raise
    server.serve(target)


def _first_message(connection: socket.socket) -> tuple[int, str, dict[str, Any]]:
    """Read the message ``build``, which names the object to create. The parent sends nothing else before the answer."""
    decoder = Decoder()
    while True:
        data = connection.recv(CHUNK_BYTES)
        if not data:
            raise SystemExit("the process that started this one is gone")
        for kind, *content in decoder.feed(data):
            assert kind == "build", kind
            return content[0], content[1], content[2]
