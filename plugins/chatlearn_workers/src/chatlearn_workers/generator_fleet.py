"""The generator replicas of a role as processes: one call for many requests, and workers that may be gone."""

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
"""Start the worker of replica ``index``, set up."""
_STATUS_S = 5.0
"""A worker whose event loop turns says how it is in milliseconds."""


class Replica:
    """One replica as the driver sees it.

    Requests that are made in one turn of the event loop travel in one call, in their order: the engine batches them
    together, so that what is in a batch does not depend on timing, and the driver pays for one message, not for each.
    Every one has a number: a step that is made again asks under the same ids, and must not get what was sampled for it
    the first time, under other weights.
    """

    def __init__(self, worker: RemoteWorker, store: ObjectStore, traffic: Traffic) -> None:
        self.worker = worker
        self._store = store
        self._traffic = traffic
        self.state: ReplicaState = "serving"
        self.policy_version = 0
        self.problem: str | None = None
        """What it said last is wrong with it."""
        self._numbers = itertools.count()
        self._open: dict[int, tuple[SamplingParams, asyncio.Future[Completion | Failure]]] = {}
        self._streamed: dict[int, OnTokens] = {}
        """By number, of open requests whose tokens are wanted as they come."""
        self._queue: list[tuple[int, GenerateRequest]] = []
        self._dropped: list[str] = []
        self._collector: asyncio.Task[None] | None = None
        self._senders: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Raises what the worker raised, or ``WorkerDiedError``."""
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
        """This request's result is no longer wanted: the engine should stop, too."""
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
            pass  # the engine lives and had nothing to end; no call waits for these requests

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
        """Take answers while requests are open."""
        try:
            while self._open:
                report, reference = await self.worker.call_for_block("collect", timeout_s=POLL_S)
                self.note(report, StoredBlock(self._store, reference, self._traffic))
        except ChatLearnError as error:
            self.lose(error)
        except Exception as error:  # this task is not awaited: pass the error to the calls that wait for answers
            self.lose(BackendError(f"{self.worker.label}, collect: {type(error).__name__}: {error}"))

    def note(self, report: ReplicaReport, block: StoredBlock) -> None:
        """Take over what the replica says of itself, and give answers to those who wait.

        A report may be older than what the driver knows from the receipt of a sync, or from a call that failed: no
        version comes back, and death is for good.
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
        """The worker cannot be reached any more: everyone who waits gets to know."""
        self.state = "dead"
        for _, future in self._open.values():
            if not future.done():
                future.set_exception(copy.copy(error))

    def stop(self) -> None:
        """No more messages to this worker."""
        for task in (self._collector, *self._senders):
            if task is not None:
                task.cancel()


class RemoteGeneratorFleet(ReplicaFleet[Replica]):
    """Replicas that are workers of their own.

    Args:
        launch: starts the worker of a replica.
        store: where the replicas leave what they sampled.
        traffic: counts what goes through the driver.
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
        """Launch all replicas at the same time."""
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
        dead.lose(WorkerDiedError(f"{dead.worker.label} is being rebuilt"))  # fails the calls that still wait for it
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
        """Ask a replica how it is; one that does not live is dead when this returns."""
        return await self._lives(replica)

    async def _lives(self, replica: Replica) -> bool:
        """While no request is open nothing else tells that its engine has died."""
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
        """A replica whose process is gone holds nothing; it is rebuilt when it is used next."""
        try:
            events: list[MemoryEvent] = await replica.worker.call("move", action, tuple(parts))
        except BackendError:
            if await self._lives(replica):
                raise
            replica.worker.kill()  # what is left of it may hold memory that others need
            return []
        return events
