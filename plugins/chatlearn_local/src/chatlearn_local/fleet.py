"""The generator replicas of the local runtime, all in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from functools import partial
from typing import Literal

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, WorkerPlace
from chatlearn_core.protocols import Generator, MemoryAction, MemoryEvent, MemoryPart
from chatlearn_core.runtime.health import health_words, problem_of
from chatlearn_core.runtime.serial_executor import SerialExecutor
from chatlearn_core.types import GenerateRequest
from chatlearn_runtime_kit.offload import move
from chatlearn_runtime_kit.replica_fleet import ReplicaFleet
from chatlearn_runtime_kit.restart_budget import Tell

Build = Callable[[int], Generator]


class LocalFleet(ReplicaFleet[Generator]):
    """Replicas whose coroutines run on this event loop, and whose blocking calls run in the role's executor.

    Args:
        build: builds replica ``index``, not yet set up.
        executor: its timeout is also the timeout of a request.
    """

    def __init__(
        self,
        name: str,
        build: Build,
        replicas: int,
        executor: SerialExecutor,
        max_restarts: int,
        tell: Tell | None = None,
    ) -> None:
        super().__init__(name, replicas, executor.timeout_s, max_restarts, tell)
        self.executor = executor
        self._build = build

    async def start(self) -> None:
        """Build and set up every replica, one after another; repeat if its engine is killed meanwhile."""
        for index in range(self.num_replicas):

            async def build(index: int = index) -> None:
                self.replicas.append(await self._launch(index))

            await self._restart_budget.start(f"replica {index}", build)

    async def _launch(self, index: int) -> Generator:
        replica = self._build(index)
        try:
            await self.executor.run("setup", replica.setup)
            if self._away:
                await self.executor.run("offload", replica.offload, frozenset(self._away))
        except BaseException:
            replica.close()
            raise
        return replica

    async def _discard(self, dead: Generator) -> None:
        with contextlib.suppress(BackendError):  # a dead replica may fail to close; it is replaced anyway
            await self.executor.run("close", dead.close)

    async def _give_up(self, replica: Generator, reason: str) -> None:
        await replica.loader.fail(reason)

    async def _lives(self, replica: Generator) -> bool:
        return replica.state != "dead"

    async def _health(self, replica: Generator) -> str | None:
        return problem_of(replica)

    async def _timed_out(self, index: int, replica: Generator, request: GenerateRequest) -> BackendTimeoutError:
        return BackendTimeoutError(
            f"role {self.name!r}, replica {index}: request {request.id!r} had no completion within "
            f"{self.timeout_s:g} s (roles.{self.name}.timeout_s). {health_words(problem_of(replica))} Raise it, or "
            "lower sampling.max_tokens or train.prompts_per_step"
        ).at(WorkerPlace(self.name, f"replica {index}", f"generate({request.id})"))

    async def _call(self, replica: Generator, method: Literal["abort", "pause", "resume"], *arguments: object) -> None:
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                await getattr(replica, method)(*arguments)
        except TimeoutError as error:
            if not limit.expired():
                raise
            where = WorkerPlace(self.name, f"replica {self.replicas.index(replica)}", method)
            raise BackendTimeoutError(
                f"{where}: no answer within {self.timeout_s:g} s (roles.{self.name}.timeout_s). "
                + health_words(problem_of(replica))
            ).at(where) from error

    async def _move(self, action: MemoryAction, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        events: list[MemoryEvent] = []
        for index, replica in enumerate(self.replicas):
            if replica.state != "dead":
                work = partial(move, replica, action, parts, role=self.name, worker=index)
                events += await self.executor.run(action, work)
        return events

    def close(self) -> None:
        """Close every replica."""
        for replica in self.replicas:
            replica.close()
