"""All ranks of a trainer role: batches are split over data-parallel ranks, answers are joined in batch order."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ChatLearnError, TrainerLostError
from chatlearn_core.plugins.records import OutputSpec
from chatlearn_core.protocols import Derive, Loss, MemoryAction, MemoryEvent, MemoryPart, Split
from chatlearn_core.types import (
    Derived,
    FileFacts,
    Metric,
    Metrics,
    OutputRequest,
    Outputs,
    Payload,
    TrainBatch,
    WeightManifest,
)
from chatlearn_runtime_kit.saved_files import merged_facts
from chatlearn_runtime_kit.sync_answers import whole_manifest
from chatlearn_workers.arrays import BatchArrays
from chatlearn_workers.blocks import StoredBlock, Traffic
from chatlearn_workers.errors import WorkerDiedError
from chatlearn_workers.outputs import DerivedFacts
from chatlearn_workers.remote import RemoteWorker, all_or_first_error
from chatlearn_workers.rpc import ObjectStore
from chatlearn_workers.split import assign, gather_metrics, gather_outputs, sequence_outputs, take


class RemoteTrainerGroup:
    """A trainer of one or more ranks, each a separate worker.

    After a rank died, hung or failed alone, the others may be stuck in a collective: the group is then broken, and
    further calls raise at once until it is started again.
    """

    def __init__(
        self, name: str, store: ObjectStore, outputs: Mapping[str, OutputSpec], traffic: Traffic | None = None
    ) -> None:
        self.name = name
        self._store = store
        self._outputs = outputs
        self.workers: list[RemoteWorker] = []
        self._broken: str | None = None
        self._broken_by: type[BackendError] = BackendError
        """Error class of calls on a broken group: a loss, which a restart may fix, or one rank's error, which would
        occur again."""
        self._slices: list[int] = []
        self._manifests: dict[Payload, WeightManifest] = {}
        self._traffic = traffic or Traffic()

    async def start(self, workers: Sequence[RemoteWorker]) -> None:
        """Let the ranks form a group and set up their trainers."""
        self.workers = list(workers)
        self._broken = None
        self._manifests.clear()
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
        """Where the ranks meet: on loopback if one node hosts them all, otherwise protected by a secret."""
        networks = await all_or_first_error([worker.call("network") for worker in self.workers])
        on_loopback = len(set(networks)) == 1
        rendezvous = await self.workers[0].call("find_rendezvous", on_loopback)
        return rendezvous, None if on_loopback else secrets.token_hex(32)

    @property
    def is_broken(self) -> bool:
        """Whether the group must be started again before it can work."""
        return self._broken is not None

    @property
    def num_slices(self) -> int:
        """Data-parallel size."""
        return max(self._slices) + 1

    async def every_rank(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method on every rank concurrently; results by rank."""
        return await self._collective([(worker, args) for worker in self.workers], method, timeout_s)

    async def one_rank(self, rank: int, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a method that is not collective on one rank."""
        [answer] = await self._collective([(self.workers[rank], args)], method, timeout_s)
        return answer

    def require_whole(self, method: str) -> None:
        """Raises: TrainerLostError, BackendError: the group is broken."""
        if self._broken is not None:
            raise self._broken_by(f"role {self.name!r} cannot {method}: {self._broken}")

    async def _collective(
        self,
        calls: Sequence[tuple[RemoteWorker, tuple[Any, ...]]],
        method: str,
        timeout_s: float | None = None,
        *,
        for_block: bool = False,
    ) -> list[Any]:
        self.require_whole(method)
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
            # A transport that timed out waiting for another end has no stack: its rank answered and can continue.
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
        """Give every rank its slice; ranks with the same slice share one object.

        Args:
            for_block: whether the method returns (facts, arrays), of which the arrays stay in the store.
        """
        for worker in self.workers:
            worker.check()  # before anything is stored, because the store may be gone
        start = time.perf_counter()
        assignment = assign(batch, self.num_slices)
        parts = [BatchArrays.of(part) for part in take(batch, assignment)]
        references = [self._store.put(part) for part in parts]
        shared = self._store.put(argument)
        num_bytes = sum(part.num_bytes for part in parts)
        self._traffic.stored_bytes += num_bytes
        self._traffic.driver_bytes += num_bytes
        self._traffic.driver_s += time.perf_counter() - start
        calls = [
            (worker, (references[index], shared)) for worker, index in zip(self.workers, self._slices, strict=True)
        ]
        return assignment, await self._collective(calls, method, for_block=for_block)

    async def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """Outputs without gradient, in batch order: per-token ones by reference, per-sequence ones by value."""
        assignment, answers = await self._over_slices(batch, "compute", request, for_block=True)
        self._traffic.stored_bytes += sum(facts.num_bytes for facts, _ in answers)
        parts = [facts.outputs(StoredBlock(self._store, reference, self._traffic)) for facts, reference in answers]
        return gather_outputs(batch, assignment, parts, self._slices, sequence_outputs(self._outputs))

    async def derive(self, batch: TrainBatch, function: Derive, split: Split = "group") -> Derived:
        """New data for a batch, computed by the ranks: per-token data by reference, per-sequence data by value."""
        one_unit = torch.zeros_like(batch.unit_index)
        divided = replace(batch, unit_index=batch.group_index if split == "group" else one_unit)
        assignment, answers = await self._over_slices(divided, "derive", function, for_block=True)
        self._traffic.stored_bytes += sum(facts.num_bytes for facts, _ in answers)
        facts: list[DerivedFacts] = [facts for facts, _ in answers]
        per_sequence = frozenset[str]().union(*(fact.per_sequence for fact in facts))
        blocks = [StoredBlock(self._store, reference, self._traffic) for _, reference in answers]
        parts = [fact.computed.outputs(block) for fact, block in zip(facts, blocks, strict=True)]
        # A function may compute only metrics.
        gathered = gather_outputs(batch, assignment, parts, self._slices, per_sequence) if any(parts) else {}
        return Derived(
            token_data={name: values for name, values in gathered.items() if name not in per_sequence},
            sequence_data={name: values for name, values in gathered.items() if name in per_sequence},
            exclusions={name: reason for fact in facts for name, reason in fact.exclusions.items()},
            metrics=gather_metrics([fact.metrics for fact in facts], self._slices),
        )

    async def update(self, batch: TrainBatch, loss: Loss) -> Metrics:
        """One optimizer step.

        Adds the data moved since the last update of any role, ``perf/object_store_bytes``, ``perf/driver_bytes`` and
        ``timing_s/object_store`` (see ``Traffic``), and with several slices ``training/ranks_imbalance``: the maximum
        over the mean of the slices' tokens.
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

    async def save(self, directory: Path) -> Mapping[str, FileFacts]:
        """Write a resumable checkpoint from all ranks; returns their facts about its files."""
        return merged_facts(await self.every_rank("save", directory.absolute()), f"role {self.name!r}")

    async def begin_save(self, directory: Path) -> bool:
        """Copy the state on all ranks and begin to write it; False if this trainer cannot."""
        return all(await self.every_rank("begin_save", directory.absolute()))

    async def finish_save(self) -> Mapping[str, FileFacts]:
        """Wait until all ranks have written; returns their facts about the files."""
        return merged_facts(await self.every_rank("finish_save"), f"role {self.name!r}")

    async def load(self, directory: Path) -> None:
        """Read a checkpoint on all ranks."""
        await self.every_rank("load", directory.absolute())

    async def load_model(self, directory: Path, *, decay: float = 0.0) -> None:
        """Load a model directory's weights on all ranks."""
        self._manifests.clear()
        await self.every_rank("load_model", directory.absolute(), decay)

    async def manifest(self, payload: Payload) -> WeightManifest:
        """The manifest of all ranks together, requested once from rank 0."""
        if payload not in self._manifests:
            found = await self.every_rank("manifest", payload)
            self._manifests[payload] = whole_manifest(found[0], f"role {self.name!r}")
        return self._manifests[payload]

    async def export_model(self, directory: Path) -> None:
        """Write a Hugging Face model directory."""
        await self.every_rank("export_model", directory.absolute())

    async def offload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """Move parts out of device memory on every rank."""
        return await self._move("offload", parts)

    async def onload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """Move parts back to the device on every rank."""
        return await self._move("onload", parts)

    async def _move(self, action: MemoryAction, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        answers = await self.every_rank("move", action, tuple(parts))
        return [event for events in answers for event in events]
