"""The worker's end of the process pool: builds one function, and calls it on one payload at a time.

Imports the standard library alone, so that a worker starts in a tenth of a second. A frame in either direction is an
item's token, a length and a body: pickled payloads come in, one JSON reply to each goes out. The pool draws a new token
for every item, so a reply either names its item or is invalid.
"""

from __future__ import annotations

import io
import os
import pickle
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from json import dumps
from pathlib import Path
from typing import Any, NoReturn

FRAME = struct.Struct("!16sQ")
"""The token of an item, and the length of the body that follows."""
MAX_REPLY_BYTES = 64 << 20
MAX_ERROR_CHARACTERS = 1000
SHOWN_FRAMES = 3
CHANNEL_LOST = 113
"""Exit status of a worker whose descriptor to the pool was closed or replaced by the function that it called."""
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


class TaskConfigError(Exception):
    """The configured task cannot be built; the message is shown to the user without a traceback."""


class Channel:
    """The worker's end of its connection to the pool. Only the process that opened it uses it.

    A user's function may fork, and may close or replace descriptors that it did not open. A forked process exits here
    silently, and a descriptor is used only while it is still the one that was opened.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._identity = self._look()
        self._process = os.getpid()
        os.set_inheritable(descriptor, False)
        os.register_at_fork(after_in_child=self._close_in_child)

    def receive(self) -> tuple[bytes, bytes]:
        """Wait for the next item and return its token and payload. Ends the process if the connection is closed."""
        token, size = FRAME.unpack(self._read(FRAME.size))
        return token, self._read(size)

    def reply(self, token: bytes, body: bytes) -> None:
        """Send the answer to the item of ``token``."""
        self.leave_if_forked()
        self._check()
        left = memoryview(FRAME.pack(token, len(body)) + body)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def leave_if_forked(self) -> None:
        """End this process if the function forked it: the pool waits for its parent."""
        if os.getpid() != self._process:
            os._exit(0)

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            self._check()
            data = os.read(self._descriptor, min(size - len(parts), 1 << 20))
            if not data:
                os._exit(0)  # the pool closed its end
            parts += data
        return bytes(parts)

    def _check(self) -> None:
        if self._look() != self._identity:
            os._exit(CHANNEL_LOST)
        os.set_blocking(self._descriptor, True)

    def _look(self) -> tuple[int, int] | None:
        try:
            found = os.fstat(self._descriptor)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _close_in_child(self) -> None:
        if self._look() == self._identity:
            os.close(self._descriptor)


def serve(descriptor: int) -> NoReturn:
    """Answer the pool until it closes the connection."""
    channel = Channel(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the pool reads both streams from one pipe
    token, description = channel.receive()
    try:
        task = _build(pickle.loads(description))
        answer = _encoded(ready=True)
    except TaskConfigError as error:
        answer = _encoded(failed=str(error), configuration=True)
    except BaseException as error:
        answer = _encoded(failed=describe_exception(error), configuration=False)
    channel.reply(token, answer)
    while True:
        token, payload = channel.receive()
        channel.reply(token, _call(task, payload, channel))


def describe_exception(error: BaseException) -> str:
    """Type, message and the innermost frames, on one line; the frames of this package only if there are no others."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    others = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    shown = (others or frames)[-SHOWN_FRAMES:]
    where = "; ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in shown)
    try:
        message = " ".join(str(error).split())
    except Exception as second:  # its __str__ may also be the user's code
        message = f"(its message cannot be shown: {type(second).__name__})"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if len(text) > MAX_ERROR_CHARACTERS:
        text = text[:MAX_ERROR_CHARACTERS] + "..."
    return f"{text} ({where})" if where else text


def _build(description: Mapping[str, Any]) -> Callable[[Any], Any]:
    if description["memory_bytes"] is not None:
        limit = description["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    module, _, name = description["factory"].partition(":")
    factory = getattr(import_module(module), name)
    task: Callable[[Any], Any] = factory(**description["arguments"])
    return task


def _call(task: Callable[[Any], Any], payload: bytes, channel: Channel) -> bytes:
    try:
        body = _encoded(value=task(pickle.loads(payload)))
        if len(body) > MAX_REPLY_BYTES:
            body = _encoded(error=f"returned {len(body)} bytes as JSON; the limit is {MAX_REPLY_BYTES}")
    except (
        BaseException
    ) as error:  # also SystemExit and KeyboardInterrupt: any exception of a task is an error of its sample
        channel.leave_if_forked()  # before it looks for the source lines of its traceback
        body = _encoded(error=describe_exception(error), exhausted=isinstance(error, MemoryError))
    for timer in TIMERS:  # an alarm that the task left would end the next task
        signal.setitimer(timer, 0)
    return body


def _encoded(**content: Any) -> bytes:
    return dumps(content).encode()
