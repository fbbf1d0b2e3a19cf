"""All workers of a reward role: calls take turns on them, a dead one is rebuilt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from chatlearn_core.exceptions import BackendError, BackendTimeoutError
from chatlearn_core.protocols import MemoryPart
from chatlearn_core.types import RewardResult, Sample
from chatlearn_ray.errors import WorkerDiedError
from chatlearn_ray.remote import RemoteWorker, all_or_first_error

Launch = Callable[[int], Awaitable[RemoteWorker]]


class RayRewardGroup:
    """User code runs in its workers, never in the driver.

    A call that a dying worker took with it is made again; one that blocks its worker past the timeout costs its
    samples.
    """

    def __init__(self, name: str, launch: Launch, num_workers: int, max_restarts: int) -> None:
        self.name = name
        self.workers: list[RemoteWorker] = []
        self.num_restarts = 0
        self._launch = launch
        self._num_workers = num_workers
        self._max_restarts = max_restarts
        self._calls = 0
        self._restart_locks = [asyncio.Lock() for _ in range(num_workers)]

    async def start(self) -> None:
        """Launch all workers at the same time."""
        self.workers = await all_or_first_error([self._launch(index) for index in range(self._num_workers)])

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One result a sample, in order; what a reward does wrong is in the results.

        Raises:
            BackendError: workers died more often than they may be rebuilt.
        """
        index = self._calls % len(self.workers)
        self._calls += 1
        while True:
            worker = self.workers[index]
            try:
                # Twice: when a call fails as a whole, the worker judges each sample alone, under the same timeout.
                results: list[RewardResult] = await worker.call("score", list(samples), timeout_s=2 * worker.timeout_s)
            except WorkerDiedError as error:
                await self._restart(index, worker, error)
            except BackendTimeoutError as error:  # it blocks the worker; a worse one could stop every run
                await self._restart(index, worker, error)
                return [RewardResult(None, error=str(error)) for _ in samples]
            else:
                return results

    async def _restart(self, index: int, dead: RemoteWorker, cause: BackendError) -> None:
        async with self._restart_locks[index]:
            if self.workers[index] is not dead:
                return
            if self.num_restarts >= self._max_restarts:
                raise BackendError(
                    f"role {self.name!r}: worker {index} was lost, and {self.num_restarts} restart(s), the limit "
                    f"(runtime.options.max_reward_restarts), are used up. Last cause: {cause}"
                ) from cause
            self.num_restarts += 1
            dead.kill()
            self.workers[index] = await self._launch(index)

    async def offload(self, parts: Collection[MemoryPart]) -> None:
        """Pass on to every worker."""
        await all_or_first_error([worker.call("offload", tuple(parts)) for worker in self.workers])

    async def onload(self, parts: Collection[MemoryPart]) -> None:
        """Pass on to every worker."""
        await all_or_first_error([worker.call("onload", tuple(parts)) for worker in self.workers])
