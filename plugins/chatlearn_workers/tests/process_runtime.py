"""A runtime of plain processes on this machine: what ``chatlearn_workers`` needs of a framework, without a framework.

A fork server starts each worker as a process that has this file imported. The driver talks to it over two
socket pairs: one for calls, one for what is answered while the worker's event loop is blocked. Values by reference are
files, which readers map.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import pickle
import shutil
import socket
import struct
import sys
import tempfile
import threading
import weakref
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatlearn_testing.fork_server import ForkedProcess, ForkServer
from chatlearn_workers.host import WorkerHost
from chatlearn_workers.rpc import CallError, ProcessEndedError, StoredValueLostError

_LENGTH = struct.Struct("!Q")
SERVER: ForkServer | None = None
"""What starts the workers, when a fixture has set it; otherwise each runtime has a server of its own."""


class FileReference:
    """A value in a ``FileStore``. The driver's own object removes the file when it goes; its copies do not."""

    __slots__ = ("__weakref__", "path")

    def __init__(self, path: str) -> None:
        self.path = path

    @staticmethod
    def owned(path: Path) -> FileReference:
        reference = FileReference(str(path))
        weakref.finalize(reference, path.unlink, missing_ok=True)
        return reference

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileReference) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return FileReference, (self.path,)


class FileStore:
    """Implements ``ObjectStore``: one file a value, the pickle first and then the arrays, which readers map."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._numbers = itertools.count()

    def __reduce__(self) -> tuple[Any, ...]:
        return FileStore, (self.directory,)

    def reserve(self) -> FileReference:
        """A reference for a value that a worker will write."""
        return FileReference.owned(self.directory / f"{os.getpid()}-{next(self._numbers)}")

    def put(self, value: Any) -> FileReference:
        reference = self.reserve()
        write_value(reference, value)
        return reference

    def get(self, references: Sequence[FileReference], timeout_s: float) -> list[Any]:
        return [read_value(reference) for reference in references]


def write_value(reference: FileReference, value: Any) -> None:
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    partial = Path(f"{reference.path}.partial")
    with partial.open("wb") as file:
        header = pickle.dumps([len(content), *(part.nbytes for part in raw)])
        for part in (_LENGTH.pack(len(header)), header, content, *raw):
            file.write(part)
    partial.replace(reference.path)


def read_value(reference: FileReference) -> Any:
    try:
        with Path(reference.path).open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise StoredValueLostError(f"{reference.path} is not there") from None
    (size,) = _LENGTH.unpack(view[: _LENGTH.size])
    at = _LENGTH.size + size
    parts = []
    for length in pickle.loads(view[_LENGTH.size : at]):
        parts.append(view[at : at + length])
        at += length
    return pickle.loads(parts[0], buffers=parts[1:])


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next message; IncompleteReadError at the end of the stream."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def write_frame(writer: asyncio.StreamWriter, message: Any) -> None:
    content = pickle.dumps(message)
    writer.write(_LENGTH.pack(len(content)) + content)


@dataclass(slots=True)
class Connection:
    """The driver's end of one socket pair: calls by number, answers in any order."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    waiting: dict[int, asyncio.Future[Any]]
    numbers: Iterable[int]

    @staticmethod
    async def over(end: socket.socket) -> Connection:
        reader, writer = await asyncio.open_connection(sock=end, limit=1 << 26)
        return Connection(reader, writer, {}, itertools.count())

    def call(self, method: str, arguments: Sequence[Any], stored: FileReference | None) -> asyncio.Future[Any]:
        number = next(iter(self.numbers))
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        write_frame(self.writer, (number, method, tuple(arguments), stored))
        self.waiting[number] = answer
        answer.add_done_callback(lambda _: self.waiting.pop(number, None))
        return answer

    async def listen(self) -> None:
        """Give answers to the calls that wait for them, until the child is gone."""
        try:
            while True:
                number, problem, value = await read_frame(self.reader)
                answer = self.waiting.get(number)
                if answer is None or answer.done():
                    continue  # no call waits for it any more
                if problem is None:
                    answer.set_result(value)
                else:
                    answer.set_exception(CallError(problem))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    def fail(self, error: CallError) -> None:
        for answer in list(self.waiting.values()):
            if not answer.done():
                answer.set_exception(error)


class ProcessHandle:
    """Implements ``WorkerHandle``."""

    def __init__(self, process: ForkedProcess, calls: Connection, control: Connection, store: FileStore) -> None:
        self.process = process
        self.store = store
        self.calls, self.control = calls, control
        self.end: str | None = None
        """How the process ended."""
        self.ended = asyncio.create_task(self._listen())

    @staticmethod
    async def start(server: ForkServer, host_arguments: Sequence[Any], store: FileStore) -> ProcessHandle:
        pairs = [socket.socketpair() for _ in range(2)]
        theirs = [pair[1] for pair in pairs]
        process = server.start(f"{__name__}:child", descriptors=[end.fileno() for end in theirs])
        process.status.setblocking(False)
        for end in theirs:
            end.close()
        calls, control = [await Connection.over(ours) for ours, _ in pairs]
        write_frame(calls.writer, (sys.path, tuple(host_arguments)))
        return ProcessHandle(process, calls, control, store)

    async def _listen(self) -> None:
        """Until the process has ended."""
        listening = asyncio.gather(self.calls.listen(), self.control.listen())
        code = self.process.ended(await asyncio.get_running_loop().sock_recv(self.process.status, 100))
        self.end = f"process {self.process.pid} was killed by signal {-code}" if code < 0 else f"it exited with {code}"
        await listening  # what it answered before
        for connection in (self.calls, self.control):
            connection.fail(ProcessEndedError(self.end))
            connection.writer.close()

    def _ask(self, connection: Connection, method: str, arguments: Sequence[Any], stored: Any = None) -> Any:
        if self.end is not None:
            answer = asyncio.get_running_loop().create_future()
            answer.set_exception(ProcessEndedError(self.end))
            return answer
        return connection.call(method, arguments, stored)

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        answer: Awaitable[Any] = self._ask(self.calls, method, arguments)
        return answer

    def call_stored(self, method: str, *arguments: Any) -> tuple[Awaitable[Any], Any]:
        stored = self.store.reserve()
        return self._ask(self.calls, method, arguments, stored), stored

    def ask(self, method: str) -> Awaitable[Any]:
        answer: Awaitable[Any] = self._ask(self.control, method, ())
        return answer

    def kill(self) -> None:
        self.process.kill()


def make_runtime(options: Any, plan: Any) -> Any:
    """The factory of the runtime's record. The class is made here, so that a child imports no torch before it must."""
    from chatlearn_core.protocols import Device
    from chatlearn_workers.runtime import WorkersRuntime

    class ProcessRuntime(WorkersRuntime):
        """Every worker a child of the driver."""

        store: FileStore

        def __init__(self) -> None:
            super().__init__(options, plan, FileStore(Path(tempfile.mkdtemp(prefix="chatlearn-store-"))))
            self._handles: list[ProcessHandle] = []
            self._own_server: ForkServer | None = None

        @property
        def _server(self) -> ForkServer:
            if SERVER is not None:
                return SERVER
            if self._own_server is None:
                self._own_server = ForkServer(__name__, "chatlearn_workers.workers")
            return self._own_server

        async def _open(self) -> None:
            """Nothing to reach: everything is here."""

        async def _start_process(self, role: Any, index: int) -> ProcessHandle:
            handle = await ProcessHandle.start(self._server, (*self._host_arguments(), None), self.store)
            self._handles.append(handle)
            return handle

        def _leave(self) -> None:
            shutil.rmtree(self.store.directory, ignore_errors=True)

        def _planned_devices(self, role: Any, index: int) -> Sequence[Device]:
            return [Device("cpu", is_gpu=False)]

        def _place_text(self, role: Any, index: int) -> str:
            return "a child of the driver"

        async def close(self) -> None:
            try:
                await super().close()
            finally:
                await asyncio.gather(*(handle.ended for handle in self._handles))
                if self._own_server is not None:
                    self._own_server.close()

    return ProcessRuntime()


# The child.


async def serve(host: WorkerHost, end: socket.socket) -> None:
    """Answer calls, each in a task of its own, in the order in which they came, until the driver is gone."""
    reader, writer = await asyncio.open_connection(sock=end, limit=1 << 26)
    await serve_streams(host, reader, writer)


async def serve_streams(host: WorkerHost, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    tasks: set[asyncio.Task[None]] = set()

    async def answer(number: int, method: str, arguments: tuple[Any, ...], stored: FileReference | None) -> None:
        problem, value = None, None
        try:
            at_hand = [read_value(a) if isinstance(a, FileReference) else a for a in arguments]
            value = await getattr(host, method)(*at_hand)
            if stored is not None:
                value, block = value
                write_value(stored, block)
            content = pickle.dumps((number, None, value))
        except Exception as error:  # of this file's own doing: the host itself raises nothing
            problem = f"{type(error).__name__}: {error}"
            content = pickle.dumps((number, problem, None))
        writer.write(_LENGTH.pack(len(content)) + content)

    try:
        while True:
            task = asyncio.create_task(answer(*await read_frame(reader)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    except (asyncio.IncompleteReadError, ConnectionError):
        os._exit(1)  # the driver is gone, and what this process computes is for no one


async def main(calls: socket.socket, control: socket.socket) -> None:
    """Become a worker."""
    reader, writer = await asyncio.open_connection(sock=calls, limit=1 << 26)
    path, host_arguments = await read_frame(reader)
    sys.path[:] = path
    host = WorkerHost(*host_arguments)
    threading.Thread(target=lambda: asyncio.run(serve(host, control)), name="control", daemon=True).start()
    await serve_streams(host, reader, writer)


def child(descriptors: Sequence[int]) -> None:
    """The program of a child, which gets the descriptors of its two sockets."""
    asyncio.run(main(*(socket.socket(fileno=number) for number in descriptors)))
