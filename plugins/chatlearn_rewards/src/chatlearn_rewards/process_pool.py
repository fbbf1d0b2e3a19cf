"""A pool of killable worker processes: one bad item costs that item and one worker, never the pool.

``concurrent.futures`` breaks as a whole when a worker dies and cannot stop one that hangs; timeouts by signal work only
in a main thread and not inside C code. Here every worker is a separate process, which is killed with SIGKILL at its
item's deadline and replaced. It gets one item at a time, and a reply counts only if it names that item, so a process
that a function forks or leaves running cannot answer for another item.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_rewards.pool_worker import describe_exception
from chatlearn_rewards.worker_output import PoolOutput, WorkerOutput
from chatlearn_rewards.worker_process import (
    MalformedReplyError,
    WorkerEndedError,
    WorkerProcess,
    WorkerStartError,
)

START_TIMEOUT_S = 120.0
"""Time to import a task in seconds: a user's module may import torch on a busy machine."""
CLOSE_TIMEOUT_S = 10.0
CLOSED = "the process pool was closed"


@dataclass(slots=True, frozen=True)
class Task:
    """The function of a pool: every worker calls ``factory(**arguments)`` once, which returns payload -> JSON value."""

    factory: str
    """Import string ``module:name``; the module is imported in the worker only."""
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Outcome:
    """The result of one item: a value, or an error that says why there is none."""

    value: Any = None
    error: str | None = None
    exhausted: bool = False
    """Whether the item exceeded its time or memory limit."""


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
    """Workers that all run the same task and take items from one queue.

    Each worker has its own thread in this process, so a pool works under any event loop and blocks none.

    Args:
        name: begins messages, for example ``reward 'math' of role 'reward'``.
        num_workers: number of processes; by default the number of CPUs, at most 4.
        timeout_s: time limit of one item in seconds.
        memory_mb: address space of one worker in MiB; None means no limit.
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
        description = {
            "factory": task.factory,
            "arguments": dict(task.arguments),
            "memory_bytes": None if memory_mb is None else memory_mb << 20,
        }
        self._description = pickle.dumps(description)
        self._name = name
        self._output = PoolOutput(name)
        self._timeout_s = timeout_s
        self._num_workers = num_workers or min(4, os.cpu_count() or 1)
        self._start_timeout_s = start_timeout_s
        self._condition = threading.Condition()
        self._queue: deque[_Item] = deque()
        self._threads: list[threading.Thread] = []
        self._workers: list[WorkerProcess | None] = [None] * self._num_workers
        self._failures: list[WorkerStartError | None] = [None] * self._num_workers
        self._closed = False

    @property
    def process_ids(self) -> list[int]:
        """Return the process ids of the live workers."""
        with self._condition:
            return [worker.pid for worker in self._workers if worker is not None and worker.pid]

    def start(self) -> None:
        """Start all workers and wait until the first one is ready.

        Raises:
            ConfigError: the task cannot be built from the user's settings.
            BackendError: no worker starts; the message quotes the worker.
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
        """Return one outcome per payload, in order. If a payload crashes its worker, its outcome is an error.

        Args:
            payloads: picklable objects; the outcome of any other object is an error.
            timeouts_s: time limit of each item, instead of the pool's.

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
            batch.dropped = True  # after a cancellation, drop the queued items
        return [outcome for outcome in batch.outcomes if outcome is not None]

    def health(self) -> str | None:
        """Return None while at least one worker lives or can be started."""
        with self._condition:
            if self._closed:
                return f"{self._name}: its process pool is closed"
            failures = [str(failure) for failure in self._failures if failure is not None]
            if self._threads and len(failures) == self._num_workers:
                return f"{self._name}: no worker starts: {failures[0]}"
            return None

    def close(self) -> None:
        """Kill every worker and fail the queued items. A repeated call does nothing."""
        with self._condition:
            self._closed = True
            items = list(self._queue)
            self._queue.clear()
            for worker in self._workers:
                if worker is not None:
                    worker.end()
            self._condition.notify_all()
        for item in items:
            self._finish(item.batch, item.index, Outcome(error=CLOSED))
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)
        self._output.close()

    # Each worker's thread.

    def _serve(self, slot: int) -> None:
        worker = self._start_worker(slot)
        while item := self._take():
            outcome, worker = self._judge(slot, worker, item)
            self._finish(item.batch, item.index, outcome)
            if worker is None:
                worker = self._start_worker(slot)
        if worker is not None:
            self._discard(slot, worker)

    def _judge(self, slot: int, worker: WorkerProcess | None, item: _Item) -> tuple[Outcome, WorkerProcess | None]:
        """Return the outcome of an item, and the worker if it can continue.

        If a worker that has run earlier items fails for another reason than a limit, the item is repeated on a new
        worker, because a thread or an alarm of an earlier item may be the cause.
        """
        while True:
            if worker is not None and not worker.alive():  # ended while idle, or sent an unrequested message
                self._discard(slot, worker)
                worker = None
            worker = worker or self._start_worker(slot)
            if worker is None:
                return Outcome(error=CLOSED if self._closed else f"no worker process: {self._failures[slot]}"), None
            first = not worker.used
            outcome, usable = self._work(worker, item)
            if usable:
                return outcome, worker
            self._discard(slot, worker)
            worker = None
            if first or outcome.exhausted or self._closed:
                return outcome, None

    def _start_worker(self, slot: int) -> WorkerProcess | None:
        if self._closed:
            return None
        worker: WorkerProcess | None = None
        try:
            worker = WorkerProcess(WorkerOutput(self._output))
            with self._condition:
                self._workers[slot] = worker
                if self._closed:
                    worker.end()
            worker.build(self._description, self._start_timeout_s)
        except (WorkerStartError, OSError) as error:  # OSError: no file descriptors are left
            if worker is not None:
                self._discard(slot, worker)
            if not isinstance(error, WorkerStartError):
                error = WorkerStartError(f"no worker process can start: {error}")
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

    def _discard(self, slot: int, worker: WorkerProcess) -> None:
        with self._condition:
            self._workers[slot] = None
        worker.close()

    def _take(self) -> _Item | None:
        """Return the next item that was not cancelled; None when the pool closes."""
        with self._condition:
            while True:
                while self._queue:
                    item = self._queue.popleft()
                    if not item.batch.dropped:
                        return item
                if self._closed:
                    return None
                self._condition.wait()

    def _work(self, worker: WorkerProcess, item: _Item) -> tuple[Outcome, bool]:
        """Return the outcome of an item, and whether the worker may take another item."""
        try:
            reply = worker.ask(item.payload, item.timeout_s)
            return Outcome(reply.get("value"), reply.get("error"), exhausted=bool(reply.get("exhausted"))), True
        except TimeoutError:
            text = f"timed out after {item.timeout_s:g} s; its worker process was killed"
            outcome = Outcome(error=text, exhausted=not self._closed)
        except WorkerEndedError as error:
            outcome = Outcome(error=f"its worker process died ({error})")
        except MalformedReplyError as error:
            text = f"its worker process sent an invalid reply ({error}) and was ended"
            outcome = Outcome(
                error=f"{text}: the function, or a process or thread that it started, writes to a file"
                " descriptor that it did not open"
            )
        except Exception as error:  # a bug in the pool may fail this item, but must not end the thread
            outcome = Outcome(error=f"the pool failed: {describe_exception(error)}")
        return Outcome(error=CLOSED) if self._closed else outcome, False

    def _finish(self, batch: _Batch, index: int, outcome: Outcome) -> None:
        with self._condition:
            batch.outcomes[index] = outcome
            batch.left -= 1
            if batch.left == 0 and not batch.done.done():
                batch.done.set_result(None)
