"""The program of a worker's process: it hosts a ``WorkerHost`` and answers the driver's calls."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from chatlearn_workers.host import WorkerHost

from acme_plugin.frames import BUFFER_BYTES, read_frame, write_frame
from acme_plugin.store import FileReference, read_value, write_value


def run(descriptors: Sequence[int]) -> None:
    """Be a worker until the driver is gone.

    Args:
        descriptors: of the sockets for calls, and for what must be answered while the event loop is blocked.
    """
    asyncio.run(_main(*(socket.socket(fileno=number) for number in descriptors)))


async def _main(calls: socket.socket, control: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=calls, limit=BUFFER_BYTES)
    path, host_arguments = await read_frame(reader)
    sys.path[:] = path
    host = WorkerHost(*host_arguments)
    threading.Thread(target=lambda: asyncio.run(_serve_socket(host, control)), name="control", daemon=True).start()
    await _serve(host, reader, writer)


async def _serve_socket(host: WorkerHost, end: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=end, limit=BUFFER_BYTES)
    await _serve(host, reader, writer)


async def _serve(host: WorkerHost, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer calls, each in a task of its own, in the order in which they came, until the driver is gone."""
    tasks: set[asyncio.Task[None]] = set()
    try:
        while True:
            task = asyncio.create_task(_answer(host, writer, *await read_frame(reader)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    except (asyncio.IncompleteReadError, ConnectionError):
        os._exit(1)  # what this process computes is for no one


async def _answer(
    host: WorkerHost,
    writer: asyncio.StreamWriter,
    number: int,
    method: str,
    arguments: tuple[Any, ...],
    stored: FileReference | None,
) -> None:
    """Call a method of the host; the second of two results stays in the store if ``stored`` is given."""
    try:
        values = [read_value(one) if isinstance(one, FileReference) else one for one in arguments]
        value = await getattr(host, method)(*values)
        if stored is not None:
            value, block = value
            write_value(stored, block)
        write_frame(writer, (number, None, value))
    except Exception as error:  # noqa: BLE001  # of the call's way here and back: the host itself raises nothing
        write_frame(writer, (number, f"{type(error).__name__}: {error}", None))
