"""The worker's end of the process pool: a light process that builds one function and calls it on what it is sent.

Imports the standard library alone, so that a worker starts in a tenth of a second. Frames in both directions are a
four-byte length and a body: pickled lists of pickled payloads come in, one JSON reply a payload goes out.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import queue
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

LENGTH = struct.Struct("!I")
MAX_ERROR_CHARACTERS = 1000
SHOWN_FRAMES = 3
PR_SET_PDEATHSIG = 1


class TaskConfigError(Exception):
    """What the user configured cannot become a task; shown to the user without a traceback."""


def main() -> None:
    """Serve until the parent closes the connection or dies."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    sys.path[:] = json.loads(sys.argv[3])
    _die_with(parent)
    os.dup2(2, 1)  # what a function prints goes to stderr: the terminal still shows it
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    connection = socket.socket(fileno=descriptor)
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_frames, args=(connection, frames), daemon=True).start()
    try:
        task = _build(pickle.loads(frames.get()))
    except TaskConfigError as error:
        _send(connection, {"failed": str(error), "configuration": True})
        return
    except BaseException as error:
        _send(connection, {"failed": describe_exception(error), "configuration": False})
        return
    _send(connection, {"ready": True})
    while True:
        for payload in pickle.loads(frames.get()):
            _send(connection, _call(task, payload))


def describe_exception(error: BaseException) -> str:
    """Type, message and the innermost frames, on one line; the frames of this package only if there are no others."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    others = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    shown = (others or frames)[-SHOWN_FRAMES:]
    where = "; ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in shown)
    message = " ".join(str(error).split())
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if len(text) > MAX_ERROR_CHARACTERS:
        text = text[:MAX_ERROR_CHARACTERS] + "..."
    return f"{text} ({where})" if where else text


def _die_with(parent: int) -> None:
    """Ask Linux to kill this process with its parent, also while a C function holds the interpreter lock."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _read_frames(connection: socket.socket, frames: queue.SimpleQueue[bytes]) -> None:
    """Runs beside the task, so that the end of the parent is seen while a task runs."""
    while True:
        header = _receive(connection, LENGTH.size)
        frames.put(_receive(connection, LENGTH.unpack(header)[0]))


def _receive(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            data = connection.recv(min(size - len(parts), 1 << 20))
        except OSError:
            data = b""
        if not data:
            os.killpg(0, signal.SIGKILL)  # the parent is gone: so go this process and what its task started
        parts += data
    return bytes(parts)


def _send(connection: socket.socket, reply: Mapping[str, Any]) -> None:
    body = json.dumps(reply).encode()
    connection.sendall(LENGTH.pack(len(body)) + body)


def _build(description: Mapping[str, Any]) -> Callable[[Any], Any]:
    if description["memory_bytes"] is not None:
        limit = description["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    module, _, name = description["factory"].partition(":")
    factory = getattr(import_module(module), name)
    task: Callable[[Any], Any] = factory(**description["arguments"])
    return task


def _call(task: Callable[[Any], Any], payload: bytes) -> Mapping[str, Any]:
    try:
        reply = {"value": task(pickle.loads(payload))}
        json.dumps(reply)
    except BaseException as error:  # SystemExit and KeyboardInterrupt as well: whatever a task raises is its sample's
        return {"error": describe_exception(error)}
    return reply
