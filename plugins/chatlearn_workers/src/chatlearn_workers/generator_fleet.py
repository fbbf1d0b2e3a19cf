"""The generator replicas of a role as processes: requests are batched into calls, and dead workers are handled."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ChatLearnError
from chatlearn_core.protocols import MemoryAction, MemoryEvent, MemoryPart, OnTokens
from chatlearn_core.runtime.health import health_words
from chatlearn_core.types import Completion, GenerateRequest, ReplicaState, SamplingParams
from chatlearn_runtime_kit.replica_fleet import ReplicaFleet
from chatlearn_runtime_kit.restart_budget import Tell
from chatlearn_workers.blocks import StoredBlock, Traffic, bytes_here
from chatlearn_workers.completions import completion_of
from chatlearn_workers.errors import WorkerDiedError
from chatlearn_workers.generator_worker import POLL_S, ReplicaReport
from chatlearn_workers.remote import RemoteWorker, all_or_first_error
from chatlearn_workers.rpc import ObjectStore
from chatlearn_workers.rpc_result import Failure

Launch = Callable[[int], Awaitable[RemoteWorker]]
"""Starts and sets up the worker of replica ``index``."""
_STATUS_S = 5.0
"""Timeout for a status report, seconds; a worker whose event loop runs answers in milliseconds."""


class Replica:
    """The driver's view of one replica.

    Requests made in one turn of the event loop are sent in one call, in order: the engine batches them together, so
    that batches do not depend on timing, and the driver sends one message instead of many. Every request has a number,
    because a repeated step uses the same ids and must not receive completions sampled earlier under other weights.
    """

    def __init__(self, worker: RemoteWorker, store: ObjectStore, traffic: Traffic) -> None:
        self.worker = worker
        self._store = store
        self._traffic = traffic
        self.state: ReplicaState = "serving"
        self.policy_version = 0
        self.problem: str | None = None
        """The problem in the replica's last report."""
        self._numbers = itertools.count()
        self._open: dict[int, tuple[SamplingParams, asyncio.Future[Completion | Failure]]] = {}
        self._streamed: dict[int, OnTokens] = {}
        """Number -> callback of open requests with streaming."""
        self._queue: list[tuple[int, GenerateRequest]] = []
        self._dropped: list[str] = []
        self._collector: asyncio.Task[None] | None = None
        self._senders: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Sample a completion. Raises the worker's error, or ``WorkerDiedError``."""
        loop = asyncio.get_running_loop()
        if not self._queue:
            loop.call_soon(self._flush)
        number = next(self._numbers)
        self._queue.append((number, request))
        future: asyncio.Future[Completion | Failure] = loop.create_future()
        self._open[number] = request.sampling, future
        if on_tokens is not None:
            self._streamed[number] = on_tokens
        try:
            outcome = await future
        except asyncio.CancelledError:
            self._drop(request.id)
            raise
        finally:
            self._open.pop(number, None)
            self._streamed.pop(number, None)
        if isinstance(outcome, Failure):
            method = f"generate({request.id})"
            raise outcome.error(self.worker.label, method, self.worker.place(method))
        return outcome

    def _flush(self) -> None:
        requests, self._queue = self._queue, []
        self._traffic.driver_bytes += sum(bytes_here(request.prompt_ids) for _, request in requests)
        self._send(self._submit(requests))

    def _drop(self, request_id: str) -> None:
        """Drop a request whose result is no longer needed, and abort it in the engine."""
        if not self._dropped:
            asyncio.get_running_loop().call_soon(self._flush_dropped)
        self._dropped.append(request_id)

    def _flush_dropped(self) -> None:
        dropped, self._dropped = tuple(self._dropped), []
        self._send(self._abort(dropped))

    async def _abort(self, request_ids: tuple[str, ...]) -> None:
        try:
            await self.worker.call("abort", request_ids)
        except (WorkerDiedError, BackendTimeoutError) as error:
            self.lose(error)
        except ChatLearnError:
            pass  # the engine lives and had nothing to abort; no call waits for these requests

    def _send(self, sending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(sending)
        self._senders.add(task)
        task.add_done_callback(self._senders.discard)

    async def _submit(self, requests: list[tuple[int, GenerateRequest]]) -> None:
        try:
            streamed = frozenset(number for number, _ in requests if number in self._streamed)
            await self.worker.call("submit", requests, streamed)
        except ChatLearnError as error:
            self.lose(error)
            return
        except Exception as error:  # such as a request that cannot be pickled
            self.lose(BackendError(f"{self.worker.label}, submit: {type(error).__name__}: {error}"))
            return
        if self._collector is None or self._collector.done():
            self._collector = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        """Collect answers while requests are open."""
        try:
            while self._open:
                report, reference = await self.worker.call_for_block("collect", timeout_s=POLL_S)
                self.note(report, StoredBlock(self._store, reference, self._traffic))
        except ChatLearnError as error:
            self.lose(error)
        except Exception as error:  # this task is not awaited: pass the error to the waiting calls
            self.lose(BackendError(f"{self.worker.label}, collect: {type(error).__name__}: {error}"))

    def note(self, report: ReplicaReport, block: StoredBlock) -> None:
        """Record a report of the replica, and pass answers to the waiting calls.

        A report may be older than the driver's knowledge from a sync receipt or a failed call: the version never goes
        back, and death is final.
        """
        self.problem = report.problem
        if report.state == "dead":
            self.state = "dead"
        self.policy_version = max(self.policy_version, report.policy_version)
        self._traffic.stored_bytes += report.num_bytes
        for number, start, token_ids in report.tokens:
            if number in self._streamed:
                self._streamed[number](start, token_ids)
        for number, outcome in report.results:
            if number not in self._open:
                continue  # no call waits for it any more
            sampling, future = self._open[number]
            if not future.done():
                future.set_result(outcome if isinstance(outcome, Failure) else completion_of(outcome, block, sampling))

    def lose(self, error: ChatLearnError) -> None:
        """Fail all waiting calls, because the worker can no longer be reached."""
        self.state = "dead"
        for _, future in self._open.values():
            if not future.done():
                future.set_exception(copy.copy(error))

    def stop(self) -> None:
        """Send no further messages to this worker."""
        for task in (self._collector, *self._senders):
            if task is not None:
                task.cancel()


class RemoteGeneratorFleet(ReplicaFleet[Replica]):
    """Replicas that are separate workers.

    Args:
        launch: starts the worker of a replica.
        store: holds the replicas' samples.
        traffic: counts data that passes through the driver.
    """

    def __init__(
        self,
        name: str,
        launch: Launch,
        num_replicas: int,
        timeout_s: float,
        max_restarts: int,
        store: ObjectStore,
        traffic: Traffic | None = None,
        tell: Tell | None = None,
    ) -> None:
        super().__init__(name, num_replicas, timeout_s, max_restarts, tell)
        self._launch_worker = launch
        self._store = store
        self._traffic = traffic or Traffic()

    async def start(self) -> None:
        """Launch all replicas concurrently."""
        workers: dict[int, RemoteWorker] = {}

        async def launch(index: int) -> None:
            workers[index] = await self._launch_worker(index)

        await all_or_first_error(
            [self._restart_budget.start(f"replica {i}", partial(launch, i)) for i in range(self.num_replicas)]
        )
        self.replicas = [Replica(workers[index], self._store, self._traffic) for index in range(self.num_replicas)]

    async def _launch(self, index: int) -> Replica:
        worker = await self._launch_worker(index)
        if self._away:
            await worker.call("move", "offload", tuple(self._away))
        return Replica(worker, self._store, self._traffic)

    async def _discard(self, dead: Replica) -> None:
        dead.lose(WorkerDiedError(f"{dead.worker.label} is being rebuilt"))  # fails the waiting calls
        dead.stop()
        dead.worker.kill()

    async def _give_up(self, replica: Replica, reason: str) -> None:
        replica.lose(BackendError(f"{replica.worker.label}: {reason}"))

    async def _timed_out(self, index: int, replica: Replica, request: GenerateRequest) -> BackendTimeoutError:
        worker = replica.worker
        stack = await worker.stacks()
        report: ReplicaReport | None = None
        with suppress(BackendTimeoutError, WorkerDiedError):
            report = await worker.call("status", timeout_s=_STATUS_S)
        words = "It does not answer." if report is None else health_words(report.problem)
        timeout = BackendTimeoutError(
            f"{worker.label}: request {request.id!r} had no completion within {self.timeout_s:g} s "
            f"(roles.{self.name}.timeout_s). {words} Raise it, or lower sampling.max_tokens or train.prompts_per_step. "
            f"{stack}"
        ).at(worker.place(f"generate({request.id})"), stack)
        if report is None:
            replica.lose(timeout)
        return timeout

    async def lives(self, replica: Replica) -> bool:
        """Check a replica; if it is not alive, it is marked dead when this returns."""
        return await self._lives(replica)

    async def _lives(self, replica: Replica) -> bool:
        """Check a replica; without open requests only this shows that its engine has died."""
        try:
            report: ReplicaReport = await replica.worker.call("status", timeout_s=_STATUS_S)
        except (WorkerDiedError, BackendTimeoutError) as error:
            replica.lose(error)
            return False
        replica.problem = report.problem
        if report.state == "dead":
            replica.lose(BackendError(f"{replica.worker.label}: its engine is dead: {report.problem}"))
            return False
        return True

    async def _health(self, replica: Replica) -> str | None:
        if replica.state != "dead":
            await self._lives(replica)
        return replica.problem

    async def _call(self, replica: Replica, method: Literal["abort", "pause", "resume"], *arguments: object) -> None:
        await replica.worker.call(method, *arguments)

    async def _move(self, action: MemoryAction, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        answers = await all_or_first_error(
            [self._move_one(replica, action, parts) for replica in self.replicas if replica.state != "dead"]
        )
        return [event for events in answers for event in events]

    async def _move_one(
        self, replica: Replica, action: MemoryAction, parts: Collection[MemoryPart]
    ) -> list[MemoryEvent]:
        """Move parts of one replica. A replica whose process is gone holds nothing and is rebuilt at its next use."""
        try:
            events: list[MemoryEvent] = await replica.worker.call("move", action, tuple(parts))
        except BackendError:
            if await self._lives(replica):
                raise
            replica.worker.kill()  # its remains may hold memory that others need
            return []
        return events
