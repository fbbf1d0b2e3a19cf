"""All workers of an environment role: rollouts are distributed over them, and a dead worker is rebuilt."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from chatlearn_core.exceptions import BackendError, ReplicaLostError
from chatlearn_core.protocols import GenerateFor, RolloutOrder
from chatlearn_core.types import Rollout
from chatlearn_runtime_kit.restart_budget import RestartBudget, Tell
from chatlearn_workers.conversation import converse
from chatlearn_workers.errors import WorkerDiedError
from chatlearn_workers.remote import RemoteWorker, all_or_first_error

Launch = Callable[[int], Awaitable[RemoteWorker]]
MAX_DEATHS = 2
"""A rollout whose workers died this often is given up, because it may be the cause."""


class RemoteEnvironments:
    """Implements ``EnvironmentGroup``. User code runs in the workers, never in the driver.

    A worker that dies is rebuilt within its restart budget, and its rollouts start again with the same seeds: they
    yield the same rollouts if the environment is deterministic.

    Args:
        launch: starts and sets up the worker with an index.
        max_restarts: maximum number of restarts per worker in a run.
        tell: called with each restart.
    """

    def __init__(
        self, name: str, launch: Launch, num_workers: int, max_restarts: int, tell: Tell | None = None
    ) -> None:
        self.name = name
        self._launch = launch
        self._num_workers = num_workers
        self._workers: list[RemoteWorker] = []
        self._locks = [asyncio.Lock() for _ in range(num_workers)]
        self._num_open: Counter[int] = Counter()
        self._restart_budget = RestartBudget(
            name,
            max_restarts,
            setting="runtime.options.max_environment_restarts",
            event="environment_worker_rebuilt",
            error=ReplicaLostError,
            tell=tell,
        )

    @property
    def workers(self) -> list[RemoteWorker]:
        """Those that serve now."""
        return list(self._workers)

    async def start(self) -> None:
        """Launch all workers concurrently."""
        workers: dict[int, RemoteWorker] = {}

        async def launch(index: int) -> None:
            workers[index] = await self._launch(index)

        await all_or_first_error(
            [self._restart_budget.start(f"worker {i}", partial(launch, i)) for i in range(self._num_workers)]
        )
        self._workers = [workers[index] for index in range(self._num_workers)]

    async def rollout(self, order: RolloutOrder, generate: GenerateFor) -> Rollout:
        """See ``EnvironmentGroup``; uses the worker with the fewest open rollouts.

        Raises:
            ReplicaLostError: a worker died and has no restarts left.
        """
        deaths: list[WorkerDiedError] = []
        while len(deaths) < MAX_DEATHS:
            index = min(range(self._num_workers), key=lambda i: (self._num_open[i], i))
            worker = self._workers[index]
            self._num_open[index] += 1
            try:
                rollout: Rollout = await converse(worker, "rollout", order, ask=generate)
            except WorkerDiedError as error:
                deaths.append(error)
                await self._replace(index, worker, error)
            else:
                return rollout
            finally:
                self._num_open[index] -= 1
        raise BackendError(
            f"environment role {self.name!r}: rollout {order.id} was given up, since {len(deaths)} workers died as "
            f"they made it, the last with: {deaths[-1]}"
        ).at(deaths[-1].place, deaths[-1].stack)

    async def _replace(self, index: int, dead: RemoteWorker, cause: WorkerDiedError) -> None:
        """Replace a dead worker once, even if several rollouts report it."""

        async def build() -> None:
            self._workers[index] = await self._launch(index)

        async with self._locks[index]:
            if self._workers[index] is dead:
                dead.kill()
                await self._restart_budget.rebuild(f"worker {index}", cause, build)
