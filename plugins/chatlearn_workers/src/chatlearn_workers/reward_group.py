"""All workers of a reward role: calls alternate between them, a dead worker is rebuilt, and lethal samples are
found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial

from chatlearn_core.exceptions import BackendError, BackendTimeoutError
from chatlearn_core.protocols import MemoryPart
from chatlearn_core.types import RewardResult, Sample
from chatlearn_runtime_kit.restart_budget import RestartBudget, Tell
from chatlearn_workers.blocks import Traffic
from chatlearn_workers.conversation import Ask, converse
from chatlearn_workers.errors import WorkerDiedError
from chatlearn_workers.remote import RemoteWorker, all_or_first_error
from chatlearn_workers.sample_codec import travelling_samples

Launch = Callable[[int], Awaitable[RemoteWorker]]


class _Place:
    """One worker and the calls on it. A call may use it exclusively."""

    def __init__(self, worker: RemoteWorker) -> None:
        self.worker = worker
        self.restart_lock = asyncio.Lock()
        self._alone = asyncio.Lock()
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Use the worker together with other calls, but not during an exclusive one."""
        async with self._alone:
            self._num_open += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._idle.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Use the worker exclusively, so that this call causes whatever happens to it."""
        async with self._alone:
            await self._idle.wait()
            yield


class RemoteRewardGroup:
    """Implements the reward group. User code runs in the workers, never in the driver.

    A worker that dies is rebuilt, and its calls are repeated. If it dies again, or a call blocks it past the timeout,
    some sample of the call is assumed to be lethal: each unit of the call (sample or group) is judged again separately,
    and only units that separately kill or block a worker get an error. Restarts caused by a sample do not count.

    Args:
        by_group: whether a group is judged as a whole.
        ask: answers the rewards' requests to other roles; None: they make none.
        tell: called with each restart.
    """

    def __init__(
        self,
        name: str,
        launch: Launch,
        num_workers: int,
        max_restarts: int,
        traffic: Traffic | None = None,
        *,
        by_group: bool = False,
        ask: Ask | None = None,
        tell: Tell | None = None,
    ) -> None:
        self.name = name
        self.by_group = by_group
        self._ask = ask
        self._launch = launch
        self._traffic = traffic or Traffic()
        self._num_workers = num_workers
        self._places: list[_Place] = []
        self._calls = 0
        self._restart_budget = RestartBudget(
            name,
            max_restarts,
            setting="runtime.options.max_reward_restarts",
            event="reward_worker_rebuilt",
            error=BackendError,
            tell=tell,
        )

    @property
    def workers(self) -> list[RemoteWorker]:
        """Those that serve now."""
        return [place.worker for place in self._places]

    @property
    def num_restarts(self) -> int:
        """Restarts that count."""
        return self._restart_budget.count

    async def start(self) -> None:
        """Launch all workers concurrently."""
        workers: dict[int, RemoteWorker] = {}

        async def launch(index: int) -> None:
            workers[index] = await self._launch(index)

        await all_or_first_error(
            [self._restart_budget.start(f"worker {i}", partial(launch, i)) for i in range(self._num_workers)]
        )
        self._places = [_Place(workers[index]) for index in range(self._num_workers)]

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Return one result per sample, in order; failures of a reward become results with errors.

        Raises:
            RoleLostError: a reward, or a role that it calls, can no longer work.
            BackendError: workers died more often than their restart limit allows.
        """
        index = self._calls % len(self._places)
        self._calls += 1
        place = self._places[index]
        async with place.shared():
            results = await self._together(index, samples)
        return results if results is not None else await self._one_by_one(index, samples)

    async def _together(self, index: int, samples: Sequence[Sample]) -> list[RewardResult] | None:
        """The results of one call, repeated if its worker dies; None if that fails, too."""
        encoded = travelling_samples(samples, self._traffic)
        for has_died in (False, True):
            worker = self._places[index].worker
            try:
                # Twice: after a call fails as a whole, the worker judges each sample separately with the same timeout.
                results = await self._call(worker, encoded, 2 * worker.timeout_s)
            except WorkerDiedError as error:
                await self._replace(index, worker, error, counts=not has_died)
            except BackendTimeoutError as error:
                await self._replace(index, worker, error, counts=False)
                return None
            else:
                return results
        return None

    async def _call(self, worker: RemoteWorker, samples: Sequence[Sample], limit_s: float) -> list[RewardResult]:
        """The results of one call."""
        results: list[RewardResult]
        if self._ask is None:
            results = await worker.call("score", samples, timeout_s=limit_s)
        else:
            results = await converse(worker, "score", samples, ask=self._ask, limit_s=limit_s)
        return results

    async def _one_by_one(self, index: int, samples: Sequence[Sample]) -> list[RewardResult]:
        """Judge each unit in its own call; a unit that kills or blocks its worker gets an error."""
        units: dict[str, list[int]] = {}
        for i, sample in enumerate(samples):
            units.setdefault(sample.group_id if self.by_group else sample.id, []).append(i)
        verdicts: dict[int, RewardResult] = {}
        place, has_killed = self._places[index], False
        for unit in units.values():
            async with place.alone():
                worker = place.worker
                try:
                    encoded = travelling_samples([samples[i] for i in unit], self._traffic)
                    results = await self._call(worker, encoded, worker.timeout_s)
                except (WorkerDiedError, BackendTimeoutError) as error:
                    has_killed = has_killed or isinstance(error, WorkerDiedError)
                    results = [RewardResult(None, error=str(error)) for _ in unit]
                    await self._replace(index, worker, error, counts=False)
            verdicts.update(zip(unit, results, strict=True))
        if has_killed and self._restart_budget.is_spent(f"worker {index}"):
            self._restart_budget.give_back(f"worker {index}")  # used by the call with all units
        return [verdicts[i] for i in range(len(samples))]

    async def _replace(self, index: int, dead: RemoteWorker, cause: BackendError, *, counts: bool) -> None:
        """Replace an unusable worker once, even if several calls report it."""
        place = self._places[index]

        async def build() -> None:
            place.worker.kill()
            place.worker = await self._launch(index)

        async with place.restart_lock:
            if place.worker is not dead:
                return
            if counts:
                await self._restart_budget.rebuild(f"worker {index}", cause, build)
            else:
                self._restart_budget.report(
                    f"worker {index}", f"was killed or blocked by a sample and is rebuilt. {cause}"
                )
                await self._restart_budget.start(f"worker {index}", build)

    async def offload(self, parts: Collection[MemoryPart]) -> None:
        """Forward to every worker."""
        await all_or_first_error([worker.call("offload", tuple(parts)) for worker in self.workers])

    async def onload(self, parts: Collection[MemoryPart]) -> None:
        """Forward to every worker."""
        await all_or_first_error([worker.call("onload", tuple(parts)) for worker in self.workers])
