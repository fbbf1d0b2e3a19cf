"""The driver's end of a worker's process."""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
from collections.abc import Awaitable, Sequence
from typing import Any

from chatlearn_hosting.fork_server import ForkedProcess, ForkServer
from chatlearn_workers.rpc import CallError, ProcessEndedError

from acme_plugin.frames import BUFFER_BYTES, read_frame, write_frame
from acme_plugin.store import FileReference, FileStore


class Connection:
    """One socket pair: calls by number, answers in any order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    @classmethod
    async def over(cls, end: socket.socket) -> Connection:
        """Take over one end of a socket pair."""
        return cls(*await asyncio.open_connection(sock=end, limit=BUFFER_BYTES))

    def call(self, method: str, arguments: Sequence[Any], stored: FileReference | None) -> asyncio.Future[Any]:
        """Send a call; returns what will have its answer."""
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        write_frame(self.writer, (number, method, tuple(arguments), stored))
        self._waiting[number] = answer
        answer.add_done_callback(lambda _: self._waiting.pop(number, None))
        return answer

    async def listen(self) -> None:
        """Give answers to the calls that wait for them, until the worker is gone."""
        try:
            while True:
                number, problem, value = await read_frame(self.reader)
                answer = self._waiting.get(number)
                if answer is None or answer.done():
                    continue  # no call waits for it any more
                if problem is None:
                    answer.set_result(value)
                else:
                    answer.set_exception(CallError(problem))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    def fail(self, error: CallError) -> None:
        """Let every call that waits raise an error, and close this end."""
        for answer in list(self._waiting.values()):
            if not answer.done():
                answer.set_exception(error)
        self.writer.close()


class ProcessHandle:
    """Implements ``chatlearn_workers.rpc.WorkerHandle``."""

    def __init__(self, process: ForkedProcess, calls: Connection, control: Connection, store: FileStore) -> None:
        self._process = process
        self._calls, self._control = calls, control
        self._store = store
        self._end: str | None = None
        """How the process ended."""
        self.ended = asyncio.create_task(self._listen())
        """Done when the process has ended and every call has its answer or its error."""

    @classmethod
    async def start(cls, server: ForkServer, host_arguments: Sequence[Any], store: FileStore) -> ProcessHandle:
        """Start a worker's process.

        Args:
            server: forks it.
            host_arguments: of its ``WorkerHost``.
            store: where its results stay.
        """
        pairs = [socket.socketpair() for _ in range(2)]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        process = server.start("acme_plugin.worker:run", descriptors=descriptors)
        process.status.setblocking(False)
        for _, theirs in pairs:
            theirs.close()
        calls, control = [await Connection.over(ours) for ours, _ in pairs]
        write_frame(calls.writer, (sys.path, tuple(host_arguments)))
        return cls(process, calls, control, store)

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """See ``WorkerHandle``."""
        return self._ask(self._calls, method, arguments)

    def call_stored(self, method: str, *arguments: Any) -> tuple[Awaitable[Any], FileReference]:
        """See ``WorkerHandle``."""
        stored = self._store.reserve()
        return self._ask(self._calls, method, arguments, stored), stored

    def ask(self, method: str) -> Awaitable[Any]:
        """See ``WorkerHandle``."""
        return self._ask(self._control, method, ())

    def kill(self) -> None:
        """See ``WorkerHandle``."""
        self._process.kill()

    def _ask(
        self, connection: Connection, method: str, arguments: Sequence[Any], stored: FileReference | None = None
    ) -> Awaitable[Any]:
        if self._end is None:
            return connection.call(method, arguments, stored)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.set_exception(ProcessEndedError(self._end))
        return answer

    async def _listen(self) -> None:
        """Take answers until the process has ended, then those that it gave before."""
        listening = asyncio.gather(self._calls.listen(), self._control.listen())
        code = self._process.ended(await asyncio.get_running_loop().sock_recv(self._process.status, 100))
        killed = f"process {self._process.pid} was killed by signal {-code}"
        self._end = killed if code < 0 else f"process {self._process.pid} exited with code {code}"
        await listening
        for connection in (self._calls, self._control):
            connection.fail(ProcessEndedError(self._end))
