"""The generator replicas of the local runtime: routing, rebuilding a dead one, retrying what it lost."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Collection

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ChatLearnError, ReplicaLostError
from chatlearn_core.protocols import Generator, MemoryPart
from chatlearn_core.runtime.lane import Lane
from chatlearn_core.types import Completion, GenerateRequest

Build = Callable[[int], Generator]
Resync = Callable[[int], Awaitable[None]]


def replica_index(request: GenerateRequest, num_replicas: int) -> int:
    """The replica that serves a request: chosen by its group's id, the same one in every runtime and at any time, so
    that a group shares its prefix and a batch does not depend on timing.
    """
    return zlib.crc32((request.group_id or request.id).encode()) % num_replicas


class LocalFleet:
    """All replicas of one generator role, in this process.

    A group's requests go to one replica, chosen by the group's id, so that they share their prefix and so that what
    is batched together does not depend on timing. A replica that died is rebuilt, gets the current weights, and its
    unfinished requests start again with the same random numbers; after ``max_restarts`` the error is raised.
    """

    def __init__(self, name: str, build: Build, replicas: int, lane: Lane, max_restarts: int) -> None:
        self.name = name
        self.lane = lane
        self.replicas: list[Generator] = []
        self.num_restarts = 0
        self.resync: Resync | None = None
        """Brings the current weights to a rebuilt replica; set once weights were synced."""
        self._build = build
        self._num_replicas = replicas
        self._max_restarts = max_restarts
        self._restart_locks = [asyncio.Lock() for _ in range(replicas)]

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
                    ) from None
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
            await self.restart(index, replica, cause)

    def _failed(self, index: int, request: GenerateRequest, error: Exception) -> BackendError:
        return BackendError(
            f"role {self.name!r}, replica {index}: generate({request.id}) failed: {type(error).__name__}: {error}"
        )

    async def restart(self, index: int, dead: Generator, cause: Exception) -> None:
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
            await self.lane.run("close", dead.close)
            replica = self._build(index)
            await self.lane.run("setup", replica.setup)
            self.replicas[index] = replica
            if self.resync is not None:
                await self.resync(index)

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End these requests on every replica."""
        await asyncio.gather(*(replica.abort(request_ids) for replica in self.replicas))

    async def offload(self, parts: Collection[MemoryPart]) -> None:
        """Pass on to every replica."""
        for replica in self.replicas:
            await self.lane.run("offload", replica.offload, parts)

    async def onload(self, parts: Collection[MemoryPart]) -> None:
        """Pass on to every replica."""
        for replica in self.replicas:
            await self.lane.run("onload", replica.onload, parts)

    def close(self) -> None:
        """Close every replica."""
        for replica in self.replicas:
            replica.close()
