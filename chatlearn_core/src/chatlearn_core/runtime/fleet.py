"""The generator replicas of the local runtime: routing, rebuilding a dead one, retrying what it lost."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Awaitable, Callable, Collection
from functools import partial

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ChatLearnError, WorkerPlace
from chatlearn_core.protocols import Generator, MemoryAction, MemoryEvent, MemoryPart, PauseMode
from chatlearn_core.runtime.lane import Lane
from chatlearn_core.runtime.moving import move
from chatlearn_core.runtime.restarts import Restarts, Tell
from chatlearn_core.types import Completion, GenerateRequest

Build = Callable[[int], Generator]
Resync = Callable[[int], Awaitable[None]]


def replica_index(request: GenerateRequest, num_replicas: int) -> int:
    """The replica that serves a request for which nobody chose one (the rollout manager does): by its group's id, the
    same one in every runtime and at any time, so that a group shares its prefix and a batch does not depend on timing.
    """
    return zlib.crc32((request.group_id or request.id).encode()) % num_replicas


def replica_restarts(role: str, limit: int, tell: Tell | None) -> Restarts:
    """The restarts of a generator role, in any runtime."""
    return Restarts(role, limit, setting="runtime.options.max_generator_restarts", event="replica_rebuilt", tell=tell)


class LocalFleet:
    """All replicas of one generator role, in this process.

    A replica that died is rebuilt, gets the current weights, and its unfinished requests start again with the same
    random numbers; after ``max_restarts`` the error is raised.
    """

    def __init__(
        self, name: str, build: Build, replicas: int, lane: Lane, max_restarts: int, tell: Tell | None = None
    ) -> None:
        self.name = name
        self.lane = lane
        self.replicas: list[Generator] = []
        self.resync: Resync | None = None
        """Brings the current weights to a rebuilt replica; set once weights were synced."""
        self._build = build
        self._num_replicas = replicas
        self._restarts = replica_restarts(name, max_restarts, tell)
        self._restart_locks = [asyncio.Lock() for _ in range(replicas)]
        self._away: set[MemoryPart] = set()
        """Parts that are offloaded, also those of a replica that is yet to be rebuilt."""
        self._running = asyncio.Event()
        """Clear between ``pause`` and ``resume``."""
        self._running.set()

    async def start(self) -> None:
        """Build and set up every replica."""
        for index in range(self._num_replicas):
            replica = self._build(index)
            self.replicas.append(replica)
            await self.lane.run("setup", replica.setup)

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
            limit = asyncio.timeout(self.lane.timeout_s)
            try:
                async with limit:
                    return await replica.generate(request)
            except TimeoutError as error:
                if limit.expired():
                    raise BackendTimeoutError(
                        f"role {self.name!r}, replica {index}: request {request.id!r} had no completion within "
                        f"{self.lane.timeout_s:g} s (roles.{self.name}.timeout_s). Raise it, or lower "
                        "sampling.max_tokens or train.prompts_per_step"
                    ).at(WorkerPlace(self.name, f"replica {index}", f"generate({request.id})")) from None
                if replica.state != "dead":
                    raise self._failed(index, request, error) from error
                cause: Exception = error
            except ChatLearnError as error:
                if replica.state != "dead":
                    raise
                cause = error
            except Exception as error:
                if replica.state != "dead":
                    raise self._failed(index, request, error) from error
                cause = error
            await self._running.wait()  # while the fleet is paused the trainer's weights may be those of no version
            await self.restart(index, replica, cause)

    def _failed(self, index: int, request: GenerateRequest, error: Exception) -> BackendError:
        return BackendError(
            f"role {self.name!r}, replica {index}: generate({request.id}) failed: {type(error).__name__}: {error}"
        ).at(WorkerPlace(self.name, f"replica {index}", f"generate({request.id})"))

    async def restart(self, index: int, dead: Generator, cause: Exception) -> None:
        """Replace a dead replica once, however many of its requests noticed."""
        async with self._restart_locks[index]:
            if self.replicas[index] is not dead:
                return
            await self._restarts.rebuild(f"replica {index}", cause, partial(self._rebuild, index))

    async def _rebuild(self, index: int) -> None:
        with contextlib.suppress(BackendError):  # what is dead may not be able to close; it is replaced all the same
            await self.lane.run("close", self.replicas[index].close)
        replica = self._build(index)
        try:
            await self.lane.run("setup", replica.setup)
            if self._away:  # others may be using the memory that it was made without
                await self.lane.run("offload", replica.offload, frozenset(self._away))
        except BaseException:
            replica.close()
            raise
        self.replicas[index] = replica
        if self.resync is not None:
            try:
                await self.resync(index)
            except BaseException as error:  # it holds the weights of the model directory
                await replica.loader.fail(f"it did not get the current weights: {error}")
                raise

    async def revive(self) -> None:
        """Rebuild the replicas that are dead: while the fleet is paused their requests wait and do not ask for it."""
        for index, replica in enumerate(self.replicas):
            if replica.state == "dead":
                await self.restart(index, replica, BackendError(f"replica {index} was found dead before a weight sync"))

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End these requests on every replica."""
        await asyncio.gather(*(replica.abort(request_ids) for replica in self.replicas))

    async def pause(self, mode: PauseMode) -> None:
        """See ``GeneratorFleet``."""
        self._running.clear()
        await asyncio.gather(*(self._pause(replica, mode) for replica in self.replicas))

    async def _pause(self, replica: Generator, mode: PauseMode) -> None:
        try:
            if replica.state != "dead":
                await replica.pause(mode)
        except ChatLearnError:
            if replica.state != "dead":
                raise  # otherwise those who wait for its answers have heard of it

    async def resume(self) -> None:
        """See ``GeneratorFleet``."""
        await asyncio.gather(*(replica.resume() for replica in self.replicas if replica.state != "dead"))
        self._running.set()

    async def offload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """See ``ModelGroup``."""
        self._away |= set(parts)
        return await self._move("offload", parts)

    async def onload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """See ``ModelGroup``."""
        self._away -= set(parts)
        return await self._move("onload", parts)

    async def _move(self, action: MemoryAction, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        events: list[MemoryEvent] = []
        for index, replica in enumerate(self.replicas):
            if replica.state != "dead":
                work = partial(move, replica, action, parts, role=self.name, worker=index)
                events += await self.lane.run(action, work)
        return events

    def close(self) -> None:
        """Close every replica."""
        for replica in self.replicas:
            replica.close()
