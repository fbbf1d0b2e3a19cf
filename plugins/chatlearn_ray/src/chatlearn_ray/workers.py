"""What lives in a worker process: one backend object of the core's protocols, driven by the core's own parts."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from chatlearn_core.exceptions import BackendTimeoutError, WeightSyncError
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.records import WeightSyncSpec
from chatlearn_core.protocols import Generator, Loss, MemoryPart, Trainer, WeightReceiver, WeightSender
from chatlearn_core.runtime.lane import Lane
from chatlearn_core.runtime.local import resolve_device
from chatlearn_core.runtime.rewards import CombinedReward, RewardPart
from chatlearn_core.types import (
    Completion,
    Endpoint,
    GenerateRequest,
    Metrics,
    OutputRequest,
    ReplicaState,
    RewardResult,
    Sample,
    SyncOffer,
    SyncPlan,
    SyncReceipt,
    WeightManifest,
)

from chatlearn_ray.answer import Failure
from chatlearn_ray.arrays import BatchArrays, TensorArray, to_arrays
from chatlearn_ray.worker_spec import PluginChoice, WorkerSpec

GRACE_S = 5.0
"""Whoever is nearer to a hang speaks first: an outer wait lasts this much longer than the inner one."""
_STOP_S = 10.0
"""A call that still runs when the worker is closed may take this long to return."""
POLL_S = 30.0
"""``collect`` answers at least this often."""


@dataclass(slots=True, frozen=True)
class WorkerFacts:
    """Where a worker runs and which part of the work it takes."""

    pid: int
    host: str
    device: str
    data_parallel_rank: int = 0
    data_parallel_size: int = 1


@dataclass(slots=True, frozen=True)
class ReplicaReport:
    """What a generator replica says of itself with every answer."""

    state: ReplicaState
    policy_version: int
    results: tuple[tuple[str, Completion | Failure], ...] = ()
    """(request id, outcome) of requests that ended."""


class Worker:
    """What all kinds share: plugins, a lane for blocking calls, one end of each weight transport."""

    def __init__(self, spec: WorkerSpec) -> None:
        spec.check_versions()
        self.spec = spec
        self.context = spec.context
        self.registry = discover_plugins()
        self.lane = Lane(self.context.role, spec.timeout_s)
        if spec.kind != "reward":
            device = resolve_device(self.context.device, f"roles.{self.context.role}.device")
            self.context = replace(self.context, device=device)

    def build(self, plugin: PluginChoice) -> Any:
        """The backend object that a choice names."""
        record, options = plugin.find(self.registry, self.spec.driver_host)
        return self.registry.load_factory(record)(options, self.context)

    def endpoint(self) -> Endpoint:
        """This process as one end of a transport."""
        context = self.context
        return Endpoint(context.role, context.replica, context.rank, socket.gethostname(), context.device, os.getpid())

    def facts(self) -> WorkerFacts:
        """Who this is."""
        return WorkerFacts(os.getpid(), socket.gethostname(), self.context.device)

    async def set_up(self, setup: Callable[[], None]) -> None:
        """Run a backend's setup in the lane, with the worker's number of threads."""
        if self.spec.num_threads is not None:
            torch.set_num_threads(self.spec.num_threads)
            await self.lane.run("set_num_threads", torch.set_num_threads, self.spec.num_threads)
        await self.lane.run("setup", setup)

    async def close_all(self, closers: Sequence[Callable[[], None]]) -> None:
        """Stop the lane, then close; the first error is raised when all were tried."""
        errors: list[Exception] = []
        stopped = await asyncio.to_thread(self.lane.stop, _STOP_S)
        if not stopped:
            errors.append(
                BackendTimeoutError(f"a call still runs after {_STOP_S:g} s. It hangs here:\n{self.lane.stack()}")
            )
        for close in closers if stopped else ():
            try:
                close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


class TrainerWorker(Worker):
    """One rank of a trainer."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._trainer: Trainer | None = None
        self._senders: dict[str, WeightSender] = {}

    @property
    def trainer(self) -> Trainer:
        assert self._trainer is not None, "setup comes first"
        return self._trainer

    async def find_rendezvous(self) -> str:
        """``tcp://host:port`` on this node, for all ranks to meet at."""
        address = node_address()
        with closing(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"

    async def setup(self, rendezvous: str | None) -> WorkerFacts:
        """Build the trainer and meet the other ranks."""
        assert self.spec.plugin is not None
        self.context = replace(self.context, rendezvous=rendezvous)
        self._trainer = self.build(self.spec.plugin)
        await self.set_up(self.trainer.setup)
        return replace(
            self.facts(),
            data_parallel_rank=self.trainer.data_parallel_rank,
            data_parallel_size=self.trainer.data_parallel_size,
        )

    async def compute(self, arrays: BatchArrays, request: OutputRequest) -> dict[str, TensorArray]:
        """Outputs of this rank's slice."""
        outputs = await self.lane.run("compute", self.trainer.compute, arrays.batch(), request)
        return to_arrays({str(name): tensor for name, tensor in outputs.items()})

    async def update(self, arrays: BatchArrays, loss: Loss) -> Metrics:
        """One optimizer step over this rank's slice."""
        return await self.lane.run("update", self.trainer.update, arrays.batch(), loss)

    async def save(self, directory: Path) -> None:
        await self.lane.run("save", self.trainer.save, directory)

    async def load(self, directory: Path) -> None:
        await self.lane.run("load", self.trainer.load, directory)

    async def export_model(self, directory: Path) -> None:
        await self.lane.run("export_model", self.trainer.export_model, directory)

    async def offload(self, parts: Collection[MemoryPart]) -> None:
        await self.lane.run("offload", self.trainer.offload, parts)

    async def onload(self, parts: Collection[MemoryPart]) -> None:
        await self.lane.run("onload", self.trainer.onload, parts)

    async def manifest(self) -> WeightManifest:
        return await self.lane.run("manifest", self.trainer.manifest)

    async def open_transport(self, key: str, plugin: PluginChoice) -> Endpoint:
        """Build this rank's sender."""
        record, options = plugin.find(self.registry, self.spec.driver_host)
        assert isinstance(record, WeightSyncSpec)
        self._senders[key] = self.registry.load_factory(record, "sender")(options, self.endpoint())
        return self.endpoint()

    async def offer(self, key: str, plan: SyncPlan) -> SyncOffer:
        return self._senders[key].offer(plan)

    async def send(self, key: str, plan: SyncPlan) -> int:
        """Bytes sent."""
        sender = self._senders[key]
        return await self.lane.run("send", sender.send, plan, self.trainer, timeout_s=plan.timeout_s + GRACE_S)

    async def release(self, key: str, plan: SyncPlan) -> None:
        self._senders[key].release(plan)

    async def close(self) -> None:
        """Close senders and trainer."""
        trainer, self._trainer = self._trainer, None
        senders, self._senders = self._senders, {}
        await self.close_all([*(sender.close for sender in senders.values()), *([trainer.close] if trainer else [])])


class GeneratorWorker(Worker):
    """One replica of a generator. Requests come many at a time and are answered as they end."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._generator: Generator | None = None
        self._receivers: dict[str, WeightReceiver] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._ended: list[tuple[str, Completion | Failure]] = []
        self._news = asyncio.Event()

    @property
    def generator(self) -> Generator:
        assert self._generator is not None, "setup comes first"
        return self._generator

    async def setup(self) -> WorkerFacts:
        """Start the engine."""
        assert self.spec.plugin is not None
        self._generator = self.build(self.spec.plugin)
        await self.set_up(self.generator.setup)
        return self.facts()

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Start requests, in order and in one turn of the event loop, so that a batch does not depend on timing."""
        for request in requests:
            task = asyncio.create_task(self._generate(request))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _generate(self, request: GenerateRequest) -> None:
        outcome: Completion | Failure
        try:
            outcome = await self.generator.generate(request)
        except Exception as error:
            outcome = Failure.of(error)
        self._ended.append((request.id, outcome))
        self._news.set()

    async def collect(self) -> ReplicaReport:
        """Requests that ended since the last call; waits for one, but not for ever."""
        try:
            async with asyncio.timeout(POLL_S):
                await self._news.wait()
        except TimeoutError:
            pass  # an empty report says that this worker is alive
        self._news.clear()
        ended, self._ended = self._ended, []
        return self._report(ended)

    def _report(self, ended: Sequence[tuple[str, Completion | Failure]] = ()) -> ReplicaReport:
        return ReplicaReport(self.generator.state, self.generator.policy_version, tuple(ended))

    async def status(self) -> ReplicaReport:
        return self._report()

    async def abort(self, request_ids: Collection[str] | None) -> None:
        await self.generator.abort(request_ids)

    async def offload(self, parts: Collection[MemoryPart]) -> None:
        await self.lane.run("offload", self.generator.offload, parts)

    async def onload(self, parts: Collection[MemoryPart]) -> None:
        await self.lane.run("onload", self.generator.onload, parts)

    async def open_transport(self, key: str, plugin: PluginChoice) -> Endpoint:
        """Build this replica's receiver."""
        record, options = plugin.find(self.registry, self.spec.driver_host)
        assert isinstance(record, WeightSyncSpec)
        self._receivers[key] = self.registry.load_factory(record, "receiver")(options, self.endpoint())
        return self.endpoint()

    async def begin(self, plan: SyncPlan) -> None:
        """Check the manifest and stop serving."""
        await self.generator.loader.begin(plan.policy_version, plan.manifest)

    async def receive(self, key: str, plan: SyncPlan, offers: Sequence[SyncOffer]) -> SyncReceipt:
        """Take the weights and serve them; a failure is a receipt, and the replica is dead."""
        loader, start = self.generator.loader, time.perf_counter()
        try:
            async with asyncio.timeout(plan.timeout_s + GRACE_S):
                num_bytes = await self._receivers[key].receive(plan, offers, loader)
            version = await loader.finish()
            if version != plan.policy_version:
                raise WeightSyncError(f"it confirmed version {version} where {plan.policy_version} was sent")
        except Exception as error:
            reason = str(error) or f"no answer within {plan.timeout_s:g} s (weight_sync.timeout_s)"
            await loader.fail(reason)
            text = f"{type(error).__name__}: {reason}"
            return SyncReceipt(self.context.replica, plan.policy_version, "dead", error=text)
        seconds = time.perf_counter() - start
        return SyncReceipt(self.context.replica, version, "serving", num_bytes, seconds)

    async def fail(self, reason: str) -> None:
        """Give the replica up."""
        await self.generator.loader.fail(reason)

    async def close(self) -> None:
        """Close receivers and engine."""
        generator, self._generator = self._generator, None
        receivers, self._receivers = self._receivers, {}
        closers: list[Callable[[], None]] = [receiver.close for receiver in receivers.values()]
        await self.close_all([*closers, *([generator.close] if generator else [])])


class RewardWorker(Worker):
    """One worker of a reward role: all its parts, combined."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._group = CombinedReward(self.context.role, (), spec.timeout_s)

    async def setup(self) -> WorkerFacts:
        """Build and start every part."""
        parts: list[RewardPart] = []
        for share in self.spec.shares:
            reward = self.build(share.plugin)
            parts.append(RewardPart(share.name, reward, share.weight, share.data_sources))
            self._group = CombinedReward(self.context.role, parts, self.spec.timeout_s)
            await self.set_up(reward.setup)
        return self.facts()

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        return await self._group.score(samples)

    async def offload(self, parts: Collection[MemoryPart]) -> None:
        await self._group.offload(parts)

    async def onload(self, parts: Collection[MemoryPart]) -> None:
        await self._group.onload(parts)

    async def close(self) -> None:
        """Close every part."""
        group, self._group = self._group, CombinedReward(self.context.role, (), 1.0)
        await self.close_all([part.reward.close for part in group.parts])


WORKERS: dict[str, Callable[[WorkerSpec], Worker]] = {
    "trainer": TrainerWorker,
    "generator": GeneratorWorker,
    "reward": RewardWorker,
}
Method = Callable[..., Awaitable[Any]]


def build_worker(spec: WorkerSpec) -> Worker:
    """The worker that a spec describes.

    Raises:
        PluginError: this interpreter does not hold what the driver chose.
    """
    return WORKERS[spec.kind](spec)


def node_address() -> str:
    """The address under which other nodes reach this one."""
    import ray

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray has no types here
    return address
