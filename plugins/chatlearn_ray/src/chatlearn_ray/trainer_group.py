"""All ranks of a trainer role: batches are split over data-parallel ranks, answers come back in batch order."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import ray

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ChatLearnError, TrainerLostError
from chatlearn_core.protocols import Loss, MemoryAction, MemoryEvent, MemoryPart
from chatlearn_core.types import Metric, Metrics, OutputRequest, Outputs, TrainBatch
from chatlearn_ray.arrays import BatchArrays
from chatlearn_ray.blocks import RayBlock, Traffic
from chatlearn_ray.errors import WorkerDiedError
from chatlearn_ray.remote import RemoteWorker, all_or_first_error
from chatlearn_ray.split import assign, gather_metrics, gather_outputs, take


class RayTrainerGroup:
    """A trainer of one or several ranks, each a worker of its own.

    After a rank died, hung or failed alone, the others may be stuck in a collective: the group is broken, and every
    further call says so at once, until it is started again.
    """

    def __init__(self, name: str, traffic: Traffic | None = None) -> None:
        self.name = name
        self.workers: list[RemoteWorker] = []
        self._broken: str | None = None
        self._broken_by: type[BackendError] = BackendError
        """What a call on a broken group is: a loss, which a restart may mend, or the error of one rank, which comes
        again."""
        self._slices: list[int] = []
        self._traffic = traffic or Traffic()

    async def start(self, workers: Sequence[RemoteWorker]) -> None:
        """Let the ranks meet and set up their trainers."""
        self.workers = list(workers)
        self._broken = None
        rendezvous, secret = await self._rendezvous() if len(self.workers) > 1 else (None, None)
        facts = await all_or_first_error([worker.call("setup", rendezvous, secret) for worker in self.workers])
        for worker, fact in zip(self.workers, facts, strict=True):
            worker.facts = fact
        self._slices = [fact.data_parallel_rank for fact in facts]
        sizes = {fact.data_parallel_size for fact in facts}
        if sizes != {max(self._slices) + 1}:
            raise BackendError(
                f"role {self.name!r}: the ranks disagree on how a batch is split: data-parallel sizes {sorted(sizes)}, "
                f"ranks {self._slices}. This is a fault of the trainer backend"
            )

    async def _rendezvous(self) -> tuple[str, str | None]:
        """Where the ranks meet: on loopback if one node has them all, else behind a secret that they alone know."""
        networks = await all_or_first_error([worker.call("network") for worker in self.workers])
        on_loopback = len(set(networks)) == 1
        rendezvous = await self.workers[0].call("find_rendezvous", on_loopback)
        return rendezvous, None if on_loopback else secrets.token_hex(32)

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
        self,
        calls: Sequence[tuple[RemoteWorker, tuple[Any, ...]]],
        method: str,
        timeout_s: float | None = None,
        *,
        for_block: bool = False,
    ) -> list[Any]:
        if self._broken is not None:
            raise self._broken_by(f"role {self.name!r} cannot {method}: {self._broken}")
        answered: list[RemoteWorker] = []

        async def call(worker: RemoteWorker, args: tuple[Any, ...]) -> Any:
            try:
                ask = worker.call_for_block if for_block else worker.call
                return await ask(method, *args, timeout_s=timeout_s)
            finally:
                answered.append(worker)

        try:
            return await all_or_first_error([call(worker, args) for worker, args in calls])
        except ChatLearnError as error:
            died = isinstance(error, WorkerDiedError)
            # A transport that waits for somebody else in vain has no stack: its rank answered, and can go on.
            hangs = isinstance(error, BackendTimeoutError) and bool(error.stack)
            if died or hangs or len(answered) < len(calls):
                self._broken_by = TrainerLostError if died or hangs else BackendError
                self._broken = f"it is broken since {method} failed: {str(error).splitlines()[0]}"
            if isinstance(error, BackendError) and (died or hangs):
                raise TrainerLostError(str(error)).at(error.place, error.stack) from error
            raise

    async def _over_slices(
        self, batch: TrainBatch, method: str, argument: Any, *, for_block: bool = False
    ) -> tuple[list[list[int]], list[Any]]:
        """Give every rank its slice; one object a slice is shared by the ranks that take it.

        Args:
            for_block: the method returns (facts, arrays); the arrays stay in the store.
        """
        for worker in self.workers:
            worker.check()  # before anything is put into a store that may be gone
        start = time.perf_counter()
        assignment = assign(batch, self.num_slices)
        parts = [BatchArrays.of(part) for part in take(batch, assignment)]
        references = [ray.put(part) for part in parts]
        shared = ray.put(argument)
        num_bytes = sum(part.num_bytes for part in parts)
        self._traffic.stored_bytes += num_bytes
        self._traffic.driver_bytes += num_bytes
        self._traffic.driver_s += time.perf_counter() - start
        calls = [
            (worker, (references[index], shared)) for worker, index in zip(self.workers, self._slices, strict=True)
        ]
        return assignment, await self._collective(calls, method, for_block=for_block)

    async def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """Outputs without gradient, in batch order: what is per token by reference, what is per sequence at hand."""
        assignment, answers = await self._over_slices(batch, "compute", request, for_block=True)
        self._traffic.stored_bytes += sum(facts.num_bytes for facts, _ in answers)
        parts = [facts.outputs(RayBlock(reference, self._traffic)) for facts, reference in answers]
        return gather_outputs(batch, assignment, parts, self._slices)

    async def measure(self, batch: TrainBatch, function: Callable[[TrainBatch], Metrics]) -> Metrics:
        """Metrics of a batch, computed by the ranks; those of the slices are merged."""
        _, answers = await self._over_slices(batch, "measure", function)
        return gather_metrics(answers, self._slices)

    async def update(self, batch: TrainBatch, loss: Loss) -> Metrics:
        """One optimizer step.

        Adds what moved since the last update of any role, ``perf/object_store_bytes``, ``perf/driver_bytes`` and
        ``timing_s/object_store`` (see ``Traffic``), and with several slices ``training/ranks_imbalance``: tokens of the
        fullest over the mean.
        """
        assignment, answers = await self._over_slices(batch, "update", loss)
        metrics = gather_metrics(answers, self._slices)
        traffic = self._traffic.taken()
        metrics["perf/object_store_bytes"] = Metric(traffic.stored_bytes, reducer="sum")
        metrics["perf/driver_bytes"] = Metric(traffic.driver_bytes, reducer="sum")
        metrics["timing_s/object_store"] = Metric(traffic.driver_s, reducer="sum")
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

    async def offload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """Move parts out of device memory on every rank."""
        return await self._move("offload", parts)

    async def onload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """Bring parts back on every rank."""
        return await self._move("onload", parts)

    async def _move(self, action: MemoryAction, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        answers = await self.every_rank("move", action, tuple(parts))
        return [event for events in answers for event in events]
