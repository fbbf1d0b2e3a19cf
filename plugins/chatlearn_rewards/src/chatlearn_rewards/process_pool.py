"""A pool of killable worker processes: one bad item costs that item and one worker, never the pool.

``concurrent.futures`` breaks as a whole when a worker dies and cannot stop one that hangs; timeouts by signal work only
in a main thread and not inside C code. Here every worker is a process of its own that is killed with SIGKILL at its
item's deadline and replaced.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_rewards.pool_worker import LENGTH, describe_exception

MAX_CHUNK_ITEMS = 32
"""Items a worker is given at once: enough to hide the pipe's latency, few enough to stay balanced."""
MAX_CHUNK_BYTES = 4 << 20
START_TIMEOUT_S = 120.0
"""For the imports of a task: a user's module may import torch on a busy machine."""
CLOSE_TIMEOUT_S = 10.0
END_TIMEOUT_S = 1.0
"""Between the end of a worker's connection and that of its process."""
CLOSED = "the process pool was closed"
BOOTSTRAP = "from chatlearn_rewards.pool_worker import main; main()"


@dataclass(slots=True, frozen=True)
class Task:
    """What every worker builds once: ``factory(**arguments)`` gives a function of one payload to a JSON value."""

    factory: str
    """Import string ``module:name``; the module is imported in the worker only."""
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Outcome:
    """What became of one item: a value, or an error that says why there is none."""

    value: Any = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class _Batch:
    """The items of one ``run``."""

    outcomes: list[Outcome | None]
    left: int
    done: Future[None]
    dropped: bool = False


@dataclass(slots=True, frozen=True, eq=False)
class _Item:
    batch: _Batch
    index: int
    payload: bytes
    timeout_s: float


class ProcessPool:
    """Workers that each hold the same task and take items from one queue.

    Every worker is driven by a thread of its own, so a pool works under any event loop and blocks none.

    Args:
        name: leads messages, for example ``reward 'math' of role 'reward'``.
        num_workers: processes; by default as many as CPUs, at most 4.
        timeout_s: longest time of one item, seconds.
        memory_mb: address space of one worker, MiB; None for no limit.
    """

    def __init__(
        self,
        task: Task,
        *,
        name: str,
        timeout_s: float,
        num_workers: int | None = None,
        memory_mb: int | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._description = {
            "factory": task.factory,
            "arguments": dict(task.arguments),
            "memory_bytes": None if memory_mb is None else memory_mb << 20,
        }
        self._name = name
        self._timeout_s = timeout_s
        self._num_workers = num_workers or min(4, os.cpu_count() or 1)
        self._start_timeout_s = start_timeout_s
        self._condition = threading.Condition()
        self._queue: deque[_Item] = deque()
        self._threads: list[threading.Thread] = []
        self._workers: list[_Worker | None] = [None] * self._num_workers
        self._failures: list[_StartError | None] = [None] * self._num_workers
        self._closed = False

    @property
    def process_ids(self) -> list[int]:
        """Processes of the workers that live."""
        with self._condition:
            return [worker.process.pid for worker in self._workers if worker is not None]

    def start(self) -> None:
        """Start all workers and wait for the first that is ready.

        Raises:
            ConfigError: the task cannot be built from what the user configured.
            BackendError: no worker starts; holds the worker's own words.
        """
        with self._condition:
            if self._threads:
                return
            for slot in range(self._num_workers):
                thread = threading.Thread(target=self._serve, args=(slot,), name=f"reward-pool-{slot}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._condition.wait_for(lambda: self._any_ready() or self._closed or all(self._failures))
            failure = next((f for f in self._failures if f is not None), None)
            if self._any_ready() or failure is None:
                return
        self.close()
        raise (ConfigError if failure.configuration else BackendError)(f"{self._name}: {failure}")

    async def run(self, payloads: Sequence[Any], timeouts_s: Sequence[float] | None = None) -> list[Outcome]:
        """One outcome a payload, in order. Nothing a payload does to its worker raises here.

        Args:
            payloads: picklable; one that is not gets an error.
            timeouts_s: of each item, instead of the pool's.

        Raises:
            BackendError: the pool is not started or was closed.
        """
        if not payloads:
            return []
        batch = _Batch([None] * len(payloads), len(payloads), Future())
        items: list[_Item] = []
        for index, payload in enumerate(payloads):
            timeout_s = self._timeout_s if timeouts_s is None else timeouts_s[index]
            try:
                items.append(_Item(batch, index, pickle.dumps(payload, pickle.HIGHEST_PROTOCOL), timeout_s))
            except Exception as error:  # pickling runs the payload's own code, which may raise anything
                text = f"cannot be sent to a worker process: {describe_exception(error)}"
                self._finish(batch, index, Outcome(error=text))
        with self._condition:
            if self._closed or not self._threads:
                raise BackendError(f"{self._name}: its process pool is {'closed' if self._closed else 'not started'}")
            self._queue.extend(items)
            self._condition.notify_all()
        try:
            await asyncio.wrap_future(batch.done)
        finally:
            batch.dropped = True  # after a cancellation: nobody wants what is still queued
        return [outcome for outcome in batch.outcomes if outcome is not None]

    def health(self) -> str | None:
        """None while at least one worker lives or can be started."""
        with self._condition:
            if self._closed:
                return f"{self._name}: its process pool is closed"
            failures = [str(failure) for failure in self._failures if failure is not None]
            if self._threads and len(failures) == self._num_workers:
                return f"{self._name}: no worker starts: {failures[0]}"
            return None

    def close(self) -> None:
        """Kill every worker and fail what is queued. Twice is fine."""
        with self._condition:
            self._closed = True
            items = list(self._queue)
            self._queue.clear()
            for worker in self._workers:
                if worker is not None:
                    worker.kill()
            self._condition.notify_all()
        for item in items:
            self._finish(item.batch, item.index, Outcome(error=CLOSED))
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)

    # Each worker's thread.

    def _serve(self, slot: int) -> None:
        worker = self._start_worker(slot)
        while chunk := self._take():
            if worker is not None and not worker.alive():  # killed from outside while idle: no item's fault
                self._discard(slot, worker)
                worker = None
            if worker is None:
                worker = self._start_worker(slot)
            if worker is None:
                for item in chunk:
                    error = CLOSED if self._closed else f"no worker process: {self._failures[slot]}"
                    self._finish(item.batch, item.index, Outcome(error=error))
                continue
            if not self._work(worker, chunk):
                self._discard(slot, worker)
                worker = self._start_worker(slot)
        if worker is not None:
            self._discard(slot, worker)

    def _start_worker(self, slot: int) -> _Worker | None:
        if self._closed:
            return None
        worker: _Worker | None = None
        try:
            worker = _Worker()
            with self._condition:
                self._workers[slot] = worker
                if self._closed:
                    worker.kill()
            worker.build(self._description, self._start_timeout_s)
        except _StartError as error:
            if worker is not None:
                self._discard(slot, worker)
            with self._condition:
                self._failures[slot] = error
                self._condition.notify_all()
            return None
        with self._condition:
            self._failures[slot] = None
            self._condition.notify_all()
        return worker

    def _any_ready(self) -> bool:
        return any(worker is not None and worker.ready for worker in self._workers)

    def _discard(self, slot: int, worker: _Worker) -> None:
        with self._condition:
            self._workers[slot] = None
        worker.close()

    def _take(self) -> list[_Item]:
        """The next chunk; empty when the pool closes."""
        with self._condition:
            while True:
                if any(item.batch.dropped for item in self._queue):
                    self._queue = deque(item for item in self._queue if not item.batch.dropped)
                if self._queue:
                    break
                if self._closed:
                    return []
                self._condition.wait()
            # Half of a fair share: workers that draw slow items leave the rest to the others.
            most = max(1, min(MAX_CHUNK_ITEMS, len(self._queue) // (2 * self._num_workers)))
            chunk, size = [self._queue.popleft()], 0
            while self._queue and len(chunk) < most and size + len(self._queue[0].payload) <= MAX_CHUNK_BYTES:
                item = self._queue.popleft()
                size += len(item.payload)
                chunk.append(item)
            return chunk

    def _work(self, worker: _Worker, chunk: list[_Item]) -> bool:
        """Let ``worker`` do ``chunk``; False if it is lost. Items behind the guilty one go back to the queue."""
        position = 0
        try:
            worker.send(pickle.dumps([item.payload for item in chunk]), chunk[0].timeout_s)
            for item in chunk:
                if item.batch.dropped:  # the worker is at something that nobody waits for
                    self._give_back(chunk[position:])
                    return False
                reply = worker.receive(item.timeout_s)
                self._finish(item.batch, item.index, Outcome(reply.get("value"), reply.get("error")))
                position += 1
        except TimeoutError:
            error = f"timed out after {chunk[position].timeout_s:g} s; its worker process was killed"
        except OSError:
            error = f"its worker process died ({worker.describe_end()})"
        else:
            return True
        if self._closed:
            error = CLOSED
        guilty = chunk[position]
        self._finish(guilty.batch, guilty.index, Outcome(error=error))
        self._give_back(chunk[position + 1 :])
        return False

    def _give_back(self, items: Sequence[_Item]) -> None:
        """Put items that were not begun back to the front of the queue; a closed pool fails them."""
        with self._condition:
            if not self._closed:
                self._queue.extendleft(reversed(items))
                self._condition.notify_all()
                return
        for item in items:
            self._finish(item.batch, item.index, Outcome(error=CLOSED))

    def _finish(self, batch: _Batch, index: int, outcome: Outcome) -> None:
        with self._condition:
            batch.outcomes[index] = outcome
            batch.left -= 1
            if batch.left == 0 and not batch.done.done():
                batch.done.set_result(None)


class _StartError(Exception):
    """A worker did not start."""

    def __init__(self, message: str, *, configuration: bool = False) -> None:
        super().__init__(message)
        self.configuration = configuration


class _Worker:
    """One worker process and the connection to it; used by one thread, killed from any."""

    def __init__(self) -> None:
        self.ready = False
        self._connection, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-c", BOOTSTRAP]
        arguments = [str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path)]
        try:
            # A process group of its own: Ctrl-C does not reach it, and killing the group takes along what it started.
            self.process = subprocess.Popen(
                command + arguments,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        except OSError as error:
            self._connection.close()
            raise _StartError(f"a worker process cannot be started: {error}") from error
        finally:
            theirs.close()

    def build(self, description: Mapping[str, Any], timeout_s: float) -> None:
        """Have the process build its task.

        Raises:
            _StartError: it cannot, or did not in time.
        """
        try:
            self.send(pickle.dumps(description), timeout_s)
            reply = self.receive(timeout_s)
        except TimeoutError as error:
            raise _StartError(f"a worker process was not ready after {timeout_s:g} s") from error
        except OSError as error:
            raise _StartError(f"a worker process died while starting ({self.describe_end()})") from error
        if "failed" in reply:
            raise _StartError(reply["failed"], configuration=reply["configuration"])
        self.ready = True

    def send(self, body: bytes, timeout_s: float) -> None:
        """Raises TimeoutError or, if the worker is gone, another OSError."""
        self._connection.settimeout(max(timeout_s, 1.0))
        self._connection.sendall(LENGTH.pack(len(body)) + body)

    def receive(self, timeout_s: float) -> Mapping[str, Any]:
        """The next reply. Raises as ``send`` does."""
        deadline = time.monotonic() + timeout_s
        size = LENGTH.unpack(self._receive(LENGTH.size, deadline))[0]
        reply: Mapping[str, Any] = json.loads(self._receive(size, deadline))
        return reply

    def _receive(self, size: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self._connection.settimeout(remaining)
            data = self._connection.recv(size - len(parts))
            if not data:
                raise ConnectionResetError("the worker closed its end")
            parts += data
        return bytes(parts)

    def describe_end(self) -> str:
        """How the process ended, in words."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while (end := self._end()) is None:
            if time.monotonic() > deadline:
                return "it closed the connection to the pool"
            time.sleep(0.005)
        if end.si_code == os.CLD_EXITED:
            return f"exit status {end.si_status}"
        return f"signal {signal.Signals(end.si_status).name}"

    def alive(self) -> bool:
        """Whether it may be given work. A process that was killed is a zombie, but for its other threads, before it can
        be waited for.
        """
        if self._end() is not None:
            return False
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:  # a system without /proc
            return True

    def _end(self) -> os.waitid_result | None:
        """How the process ended, if it did, without reaping it: its id, which names its group, stays its own."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def kill(self) -> None:
        """SIGKILL to the process and what it started; only before it is reaped."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill, reap and close."""
        self.kill()
        self.process.wait()
        self._connection.close()
