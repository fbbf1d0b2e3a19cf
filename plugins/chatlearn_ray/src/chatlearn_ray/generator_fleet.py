"""All replicas of a generator role: routing by group, one call for many requests, restarts of dead replicas."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from typing import Any

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ChatLearnError
from chatlearn_core.protocols import MemoryAction, MemoryEvent, MemoryPart, PauseMode
from chatlearn_core.runtime.fleet import replica_index, replica_restarts
from chatlearn_core.runtime.restarts import Tell
from chatlearn_core.types import Completion, GenerateRequest, ReplicaState, SamplingParams
from chatlearn_ray.answer import Failure
from chatlearn_ray.blocks import RayBlock, Traffic
from chatlearn_ray.completions import completion_of
from chatlearn_ray.errors import WorkerDiedError
from chatlearn_ray.generator_worker import POLL_S, ReplicaReport
from chatlearn_ray.remote import RemoteWorker, all_or_first_error

Launch = Callable[[int], Awaitable[RemoteWorker]]
"""Start the worker of replica ``index``, set up."""
Resync = Callable[[int], Awaitable[None]]
_STATUS_S = 5.0
"""A worker whose event loop turns says how it is in milliseconds."""


class Replica:
    """One replica as the driver sees it.

    Requests that are made in one turn of the event loop travel in one call, in their order: the engine batches them
    together, so that what is in a batch does not depend on timing, and the driver pays for one message, not for each.
    Every one has a number: a step that is made again asks under the same ids, and must not get what was sampled for it
    the first time, under other weights.
    """

    def __init__(self, worker: RemoteWorker, traffic: Traffic) -> None:
        self.worker = worker
        self._traffic = traffic
        self.state: ReplicaState = "serving"
        self.policy_version = 0
        self._numbers = itertools.count()
        self._open: dict[int, tuple[SamplingParams, asyncio.Future[Completion | Failure]]] = {}
        self._queue: list[tuple[int, GenerateRequest]] = []
        self._dropped: list[str] = []
        self._collector: asyncio.Task[None] | None = None
        self._senders: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raises what the worker raised, or ``WorkerDiedError``."""
        loop = asyncio.get_running_loop()
        if not self._queue:
            loop.call_soon(self._flush)
        number = next(self._numbers)
        self._queue.append((number, request))
        future: asyncio.Future[Completion | Failure] = loop.create_future()
        self._open[number] = request.sampling, future
        try:
            outcome = await future
        except asyncio.CancelledError:
            self._drop(request.id)
            raise
        finally:
            self._open.pop(number, None)
        if isinstance(outcome, Failure):
            method = f"generate({request.id})"
            raise outcome.error(self.worker.label, method, self.worker.place(method))
        return outcome

    def _flush(self) -> None:
        requests, self._queue = self._queue, []
        self._traffic.driver_bytes += sum(request.prompt_ids.nbytes for _, request in requests)
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
        except (WorkerDiedError, BackendTimeoutError) as error:
            self.lose(error)
        except ChatLearnError:
            pass  # the engine lives and had nothing to end; nobody waits for these requests

    def _send(self, sending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(sending)
        self._senders.add(task)
        task.add_done_callback(self._senders.discard)

    async def _submit(self, requests: list[tuple[int, GenerateRequest]]) -> None:
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
                report, reference = await self.worker.call_for_block("collect", timeout_s=POLL_S)
                self.note(report, RayBlock(reference, self._traffic))
        except ChatLearnError as error:
            self.lose(error)
        except Exception as error:  # nobody awaits this task: those who wait for answers must hear of it
            self.lose(BackendError(f"{self.worker.label}, collect: {type(error).__name__}: {error}"))

    def note(self, report: ReplicaReport, block: RayBlock) -> None:
        """Take over what the replica says of itself, and give answers to those who wait."""
        self.state, self.policy_version = report.state, report.policy_version
        self._traffic.stored_bytes += report.num_bytes
        for number, outcome in report.results:
            if number not in self._open:
                continue  # nobody waits for it any more
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


class RayGeneratorFleet:
    """All replicas of one generator role.

    A replica that died is rebuilt, gets the current weights, and its unfinished requests start again with the same
    random numbers; after ``max_restarts`` the error is raised.
    """

    def __init__(
        self,
        name: str,
        launch: Launch,
        num_replicas: int,
        timeout_s: float,
        max_restarts: int,
        traffic: Traffic | None = None,
        tell: Tell | None = None,
    ) -> None:
        self.name = name
        self.replicas: list[Replica] = []
        self.resync: Resync | None = None
        """Brings the current weights to a rebuilt replica; set once weights were synced."""
        self._launch = launch
        self._num_replicas = num_replicas
        self._timeout_s = timeout_s
        self._restarts = replica_restarts(name, max_restarts, tell)
        self._traffic = traffic or Traffic()
        self._restart_locks = [asyncio.Lock() for _ in range(num_replicas)]
        self._away: set[MemoryPart] = set()
        """Parts that are offloaded, also those of a replica that is yet to be rebuilt."""
        self._running = asyncio.Event()
        """Clear between ``pause`` and ``resume``."""
        self._running.set()

    async def start(self) -> None:
        """Launch all replicas at the same time."""
        workers: dict[int, RemoteWorker] = {}

        async def launch(index: int) -> None:
            workers[index] = await self._launch(index)

        await all_or_first_error(
            [self._restarts.start(f"replica {i}", partial(launch, i)) for i in range(self._num_replicas)]
        )
        self.replicas = [Replica(workers[index], self._traffic) for index in range(self._num_replicas)]

    @property
    def policy_version(self) -> int:
        """Oldest version among the replicas that serve."""
        return min((r.policy_version for r in self.replicas if r.state == "serving"), default=0)

    @property
    def num_restarts(self) -> int:
        """How often a replica was rebuilt."""
        return self._restarts.count

    @property
    def num_replicas(self) -> int:
        """As configured."""
        return self._num_replicas

    async def generate(self, request: GenerateRequest, replica: int | None = None) -> Completion:
        """See ``GeneratorFleet``."""
        index = replica_index(request, len(self.replicas)) if replica is None else replica
        return await self._generate(request, index)

    async def _generate(self, request: GenerateRequest, index: int) -> Completion:
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
                timeout = await self._timed_out(replica, request)
                if replica.state != "dead":
                    raise timeout from None
                cause: ChatLearnError = timeout
            except ChatLearnError as error:
                if replica.state != "dead":
                    raise
                cause = error
            await self._running.wait()  # while the fleet is paused the trainer's weights may be those of no version
            await self.restart(index, replica, cause)

    async def restart(self, index: int, dead: Replica, cause: Exception) -> None:
        """Replace a dead replica once, however many of its requests noticed."""
        async with self._restart_locks[index]:
            if self.replicas[index] is not dead:
                return
            await self._restarts.rebuild(f"replica {index}", cause, partial(self._rebuild, index))

    async def rebuild_given_up(self) -> None:
        """Rebuild replicas that were given up, without weights: the next sync brings them. Nothing is counted: it was
        not they who failed.
        """
        self.resync = None
        for index, replica in enumerate(self.replicas):
            if replica.state == "dead":
                async with self._restart_locks[index]:
                    self._restarts.report(f"replica {index}", "was given up with the trainer and is rebuilt")
                    await self._restarts.start(f"replica {index}", partial(self._rebuild, index))

    async def _rebuild(self, index: int) -> None:
        dead = self.replicas[index]
        dead.lose(WorkerDiedError(f"{dead.worker.label} is being rebuilt"))  # whoever still waits for its answers
        dead.stop()
        dead.worker.kill()
        worker = await self._launch(index)
        if self._away:  # others may be using the memory that it was made without
            await worker.call("move", "offload", tuple(self._away))
        replica = self.replicas[index] = Replica(worker, self._traffic)
        if self.resync is not None:
            try:
                await self.resync(index)
            except BaseException:
                replica.state = "dead"  # it holds the weights of the model directory
                raise

    async def _timed_out(self, replica: Replica, request: GenerateRequest) -> BackendTimeoutError:
        """What to say of a request without a completion; a worker that does not even say how it is, is given up."""
        worker = replica.worker
        stack = await worker.stacks()
        timeout = BackendTimeoutError(
            f"{worker.label}: request {request.id!r} had no completion within {self._timeout_s:g} s "
            f"(roles.{self.name}.timeout_s). Raise it, or lower sampling.max_tokens or train.prompts_per_step. {stack}"
        ).at(worker.place(f"generate({request.id})"), stack)
        try:
            await worker.call("status", timeout_s=_STATUS_S)
        except (BackendTimeoutError, WorkerDiedError):
            replica.lose(timeout)
        return timeout

    async def revive(self) -> None:
        """Rebuild the replicas that are dead: while the fleet is paused their requests wait and do not ask for it."""
        await asyncio.gather(*(self._lives(replica) for replica in self.replicas if replica.state != "dead"))
        for index, replica in enumerate(self.replicas):
            if replica.state == "dead":
                await self.restart(index, replica, BackendError(f"replica {index} was found dead before a weight sync"))

    async def _lives(self, replica: Replica) -> bool:
        """Ask a replica how it is: while no request is open nothing else tells that its engine has died."""
        try:
            report: ReplicaReport = await replica.worker.call("status", timeout_s=_STATUS_S)
        except (WorkerDiedError, BackendTimeoutError) as error:
            replica.lose(error)
            return False
        if report.state == "dead":
            replica.lose(BackendError(f"{replica.worker.label}: its engine is dead"))
            return False
        return True

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End these requests on every replica."""
        ids = None if request_ids is None else tuple(request_ids)
        living = [replica for replica in self.replicas if replica.state != "dead"]
        await all_or_first_error([replica.worker.call("abort", ids) for replica in living])

    async def pause(self, mode: PauseMode) -> None:
        """See ``GeneratorFleet``."""
        self._running.clear()
        await all_or_first_error([self._tell(replica, "pause", mode) for replica in self.replicas])

    async def resume(self) -> None:
        """See ``GeneratorFleet``."""
        await all_or_first_error([self._tell(replica, "resume") for replica in self.replicas])
        self._running.set()

    async def _tell(self, replica: Replica, method: str, *arguments: Any) -> None:
        """Call a replica that lives; if it dies of it, those who wait for its answers are told."""
        if replica.state == "dead":
            return
        try:
            await replica.worker.call(method, *arguments)
        except BackendError:
            if await self._lives(replica):
                raise

    async def offload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """See ``ModelGroup``."""
        self._away |= set(parts)
        return await self._move("offload", parts)

    async def onload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """See ``ModelGroup``."""
        self._away -= set(parts)
        return await self._move("onload", parts)

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
