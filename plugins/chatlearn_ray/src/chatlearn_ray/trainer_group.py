"""All ranks of a trainer role: batches are split over data-parallel ranks, answers come back in batch order."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import ray

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ChatLearnError, TrainerLostError
from chatlearn_core.protocols import Loss, MemoryPart
from chatlearn_core.types import Metric, Metrics, OutputRequest, Outputs, TrainBatch
from chatlearn_ray.arrays import BatchArrays, to_tensors
from chatlearn_ray.errors import WorkerDiedError
from chatlearn_ray.remote import RemoteWorker, all_or_first_error
from chatlearn_ray.split import assign, gather_metrics, gather_outputs, take


class RayTrainerGroup:
    """A trainer of one or several ranks, each a worker of its own.

    After a rank died, hung or failed alone, the others may be stuck in a collective: the group is broken, and every
    further call says so at once, until it is started again.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.workers: list[RemoteWorker] = []
        self.num_restarts = 0
        self._broken: str | None = None
        self._slices: list[int] = []
        self._put_bytes = 0
        self._put_s = 0.0

    async def start(self, workers: Sequence[RemoteWorker]) -> None:
        """Let the ranks meet and set up their trainers."""
        self.workers = list(workers)
        self._broken = None
        rendezvous = await self.workers[0].call("find_rendezvous") if len(self.workers) > 1 else None
        facts = await all_or_first_error([worker.call("setup", rendezvous) for worker in self.workers])
        for worker, fact in zip(self.workers, facts, strict=True):
            worker.facts = fact
        self._slices = [fact.data_parallel_rank for fact in facts]
        sizes = {fact.data_parallel_size for fact in facts}
        if sizes != {max(self._slices) + 1}:
            raise BackendError(
                f"role {self.name!r}: the ranks disagree on how a batch is split: data-parallel sizes {sorted(sizes)}, "
                f"ranks {self._slices}. This is a fault of the trainer backend"
            )

    @property
    def is_broken(self) -> bool:
        """Whether only a new start helps."""
        return self._broken is not None

    @property
    def num_slices(self) -> int:
        """Data-parallel size."""
        return max(self._slices) + 1

    async def every_rank(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method on every rank at the same time; the results by rank."""
        return await self._collective([(worker, args) for worker in self.workers], method, timeout_s)

    async def _collective(
        self, calls: Sequence[tuple[RemoteWorker, tuple[Any, ...]]], method: str, timeout_s: float | None = None
    ) -> list[Any]:
        if self._broken is not None:
            raise BackendError(f"role {self.name!r} cannot {method}: {self._broken}")
        answered: list[RemoteWorker] = []

        async def call(worker: RemoteWorker, args: tuple[Any, ...]) -> Any:
            try:
                return await worker.call(method, *args, timeout_s=timeout_s)
            finally:
                answered.append(worker)

        try:
            return await all_or_first_error([call(worker, args) for worker, args in calls])
        except ChatLearnError as error:
            died = isinstance(error, WorkerDiedError)
            if died or isinstance(error, BackendTimeoutError) or len(answered) < len(calls):
                self._broken = f"it is broken since {method} failed: {str(error).splitlines()[0]}"
            if died:
                raise TrainerLostError(str(error)) from error
            raise

    async def _over_slices(self, batch: TrainBatch, method: str, argument: Any) -> tuple[list[list[int]], list[Any]]:
        """Give every rank its slice; one object a slice is shared by the ranks that take it."""
        start = time.perf_counter()
        assignment = assign(batch, self.num_slices)
        parts = [BatchArrays.of(part) for part in take(batch, assignment)]
        references = [ray.put(part) for part in parts]
        shared = ray.put(argument)
        self._put_s += time.perf_counter() - start
        self._put_bytes += sum(part.num_bytes for part in parts)
        calls = [
            (worker, (references[index], shared)) for worker, index in zip(self.workers, self._slices, strict=True)
        ]
        return assignment, await self._collective(calls, method)

    async def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """Outputs without gradient, in batch order."""
        assignment, answers = await self._over_slices(batch, "compute", request)
        outputs: list[Any] = [to_tensors(answer) for answer in answers]
        return gather_outputs(batch, assignment, outputs, self._slices)

    async def update(self, batch: TrainBatch, loss: Loss) -> Metrics:
        """One optimizer step.

        Adds ``perf/object_store_bytes`` and ``timing_s/object_store``, what the driver put there since the last update
        and how long it took, and with several slices ``training/ranks_imbalance``: tokens of the fullest over the mean.
        """
        assignment, answers = await self._over_slices(batch, "update", loss)
        metrics = gather_metrics(answers, self._slices)
        metrics["perf/object_store_bytes"] = Metric(self._put_bytes, reducer="sum")
        metrics["timing_s/object_store"] = Metric(self._put_s, reducer="sum")
        self._put_bytes, self._put_s = 0, 0.0
        if self.num_slices > 1 and batch.num_tokens:
            lengths = batch.lengths
            fullest = max(sum(lengths[i] for i in indices) for indices in assignment)
            metrics["training/ranks_imbalance"] = Metric(fullest * self.num_slices / batch.num_tokens)
        return metrics

    async def save(self, directory: Path) -> None:
        """A resumable checkpoint, written by all ranks."""
        await self.every_rank("save", directory.absolute())

    async def load(self, directory: Path) -> None:
        """Read a checkpoint on all ranks."""
        await self.every_rank("load", directory.absolute())

    async def export_model(self, directory: Path) -> None:
        """A Hugging Face model directory."""
        await self.every_rank("export_model", directory.absolute())

    async def offload(self, parts: Collection[MemoryPart]) -> None:
        """Move parts out of device memory on every rank."""
        await self.every_rank("offload", tuple(parts))

    async def onload(self, parts: Collection[MemoryPart]) -> None:
        """Bring parts back on every rank."""
        await self.every_rank("onload", tuple(parts))
