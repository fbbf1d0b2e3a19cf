"""All replicas of a generator role: routing by group, one call for many requests, restarts of dead replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ChatLearnError, ReplicaLostError
from chatlearn_core.protocols import MemoryPart
from chatlearn_core.runtime.fleet import replica_index
from chatlearn_core.types import Completion, GenerateRequest, ReplicaState
from chatlearn_ray.answer import Failure
from chatlearn_ray.generator_worker import POLL_S, ReplicaReport
from chatlearn_ray.remote import RemoteWorker, all_or_first_error

Launch = Callable[[int], Awaitable[RemoteWorker]]
"""Start the worker of replica ``index``, set up."""
Resync = Callable[[int], Awaitable[None]]


class Replica:
    """One replica as the driver sees it.

    Requests that are made in one turn of the event loop travel in one call, in their order: the engine batches them
    together, so that what is in a batch does not depend on timing, and the driver pays for one message, not for each.
    """

    def __init__(self, worker: RemoteWorker) -> None:
        self.worker = worker
        self.state: ReplicaState = "serving"
        self.policy_version = 0
        self._open: dict[str, asyncio.Future[Completion | Failure]] = {}
        self._queue: list[GenerateRequest] = []
        self._dropped: list[str] = []
        self._collector: asyncio.Task[None] | None = None
        self._senders: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raises what the worker raised, or ``WorkerDiedError``."""
        loop = asyncio.get_running_loop()
        if not self._queue:
            loop.call_soon(self._flush)
        self._queue.append(request)
        future = self._open[request.id] = loop.create_future()
        try:
            outcome: Completion | Failure = await future
        except asyncio.CancelledError:
            self._drop(request.id)
            raise
        finally:
            self._open.pop(request.id, None)
        if isinstance(outcome, Failure):
            raise outcome.error(self.worker.label, f"generate({request.id})")
        return outcome

    def _flush(self) -> None:
        requests, self._queue = self._queue, []
        self._send(self._submit(requests))

    def _drop(self, request_id: str) -> None:
        """Nobody waits for this request any more: the engine should not either."""
        if not self._dropped:
            asyncio.get_running_loop().call_soon(self._flush_dropped)
        self._dropped.append(request_id)

    def _flush_dropped(self) -> None:
        dropped, self._dropped = tuple(self._dropped), []
        self._send(self._abort(dropped))

    async def _abort(self, request_ids: tuple[str, ...]) -> None:
        try:
            await self.worker.call("abort", request_ids)
        except ChatLearnError as error:
            self.lose(error)

    def _send(self, sending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(sending)
        self._senders.add(task)
        task.add_done_callback(self._senders.discard)

    async def _submit(self, requests: list[GenerateRequest]) -> None:
        try:
            await self.worker.call("submit", requests)
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
                self.note(await self.worker.call("collect", timeout_s=POLL_S))
        except ChatLearnError as error:
            self.lose(error)
        except Exception as error:  # nobody awaits this task: those who wait for answers must hear of it
            self.lose(BackendError(f"{self.worker.label}, collect: {type(error).__name__}: {error}"))

    def note(self, report: ReplicaReport) -> None:
        """Take over what the replica says of itself, and give answers to those who wait."""
        self.state, self.policy_version = report.state, report.policy_version
        for request_id, outcome in report.results:
            future = self._open.get(request_id)
            if future is not None and not future.done():
                future.set_result(outcome)

    def lose(self, error: ChatLearnError) -> None:
        """The worker cannot be reached any more: everyone who waits gets to know."""
        self.state = "dead"
        for future in self._open.values():
            if not future.done():
                future.set_exception(type(error)(*error.args))

    def stop(self) -> None:
        """No more messages to this worker."""
        for task in (self._collector, *self._senders):
            if task is not None:
                task.cancel()


class RayGeneratorFleet:
    """All replicas of one generator role.

    A group's requests go to one replica, chosen by the group's id, so that they share their prefix. A replica that
    died is rebuilt, gets the current weights, and its unfinished requests start again with the same random numbers;
    after ``max_restarts`` the error is raised.
    """

    def __init__(self, name: str, launch: Launch, num_replicas: int, timeout_s: float, max_restarts: int) -> None:
        self.name = name
        self.replicas: list[Replica] = []
        self.num_restarts = 0
        self.resync: Resync | None = None
        """Brings the current weights to a rebuilt replica; set once weights were synced."""
        self._launch = launch
        self._num_replicas = num_replicas
        self._timeout_s = timeout_s
        self._max_restarts = max_restarts
        self._restart_locks = [asyncio.Lock() for _ in range(num_replicas)]

    async def start(self) -> None:
        """Launch all replicas at the same time."""
        workers = await all_or_first_error([self._launch(index) for index in range(self._num_replicas)])
        self.replicas = [Replica(worker) for worker in workers]

    @property
    def policy_version(self) -> int:
        """Oldest version among the replicas that serve."""
        return min((r.policy_version for r in self.replicas if r.state == "serving"), default=0)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion on the replica of the request's group.

        Raises:
            ReplicaLostError: the replica died, and may not be rebuilt any more.
            BackendTimeoutError: no completion within the role's timeout.
            BackendError: the request failed on a replica that lives.
        """
        index = replica_index(request, len(self.replicas))
        while True:
            if self._restart_locks[index].locked():
                async with self._restart_locks[index]:
                    pass  # a rebuilt replica serves nobody before it holds the current weights
            replica = self.replicas[index]
            limit = asyncio.timeout(self._timeout_s)
            try:
                async with limit:
                    return await replica.generate(request)
            except TimeoutError:
                raise BackendTimeoutError(
                    f"{replica.worker.label}: request {request.id!r} had no completion within {self._timeout_s:g} s "
                    f"(roles.{self.name}.timeout_s). Raise it, or lower sampling.max_tokens or train.prompts_per_step. "
                    f"{await replica.worker.stacks()}"
                ) from None
            except ChatLearnError as error:
                if replica.state != "dead":
                    raise
                cause = error
            await self.restart(index, replica, cause)

    async def restart(self, index: int, dead: Replica, cause: Exception) -> None:
        """Replace a dead replica once, however many of its requests noticed."""
        async with self._restart_locks[index]:
            if self.replicas[index] is not dead:
                return
            if self.num_restarts >= self._max_restarts:
                raise ReplicaLostError(
                    f"role {self.name!r}: replica {index} died, and {self.num_restarts} restart(s), the limit "
                    f"(runtime.options.max_generator_restarts), are used up. Last cause: {cause}"
                ) from cause
            self.num_restarts += 1
            dead.stop()
            dead.worker.kill()
            self.replicas[index] = Replica(await self._launch(index))
            if self.resync is not None:
                await self.resync(index)

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End these requests on every replica."""
        ids = None if request_ids is None else tuple(request_ids)
        await all_or_first_error([replica.worker.call("abort", ids) for replica in self.replicas])

    async def offload(self, parts: Collection[MemoryPart]) -> None:
        """Pass on to every replica."""
        await all_or_first_error([replica.worker.call("offload", tuple(parts)) for replica in self.replicas])

    async def onload(self, parts: Collection[MemoryPart]) -> None:
        """Pass on to every replica."""
        await all_or_first_error([replica.worker.call("onload", tuple(parts)) for replica in self.replicas])
