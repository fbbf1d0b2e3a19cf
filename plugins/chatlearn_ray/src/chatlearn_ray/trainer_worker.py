"""One rank of a trainer, in its own process."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from chatlearn_core.hosting.engine_side.private_store import LOOPBACK
from chatlearn_core.hosting.reserved_port import ReservedPort
from chatlearn_core.plugins.records import WeightSyncSpec
from chatlearn_core.protocols import Loss, MemoryAction, MemoryEvent, MemoryPart, Trainer, WeightSender
from chatlearn_core.runtime.boundary import check_outputs
from chatlearn_core.runtime.moving import move
from chatlearn_core.runtime.sync_answers import checked_offer
from chatlearn_core.types import (
    Endpoint,
    Metrics,
    OutputRequest,
    Outputs,
    Payload,
    SyncOffer,
    SyncPlan,
    TrainBatch,
    WeightManifest,
)
from chatlearn_core.types.stored import Array
from chatlearn_ray.arrays import BatchArrays
from chatlearn_ray.outputs import ComputedFacts, pack_outputs
from chatlearn_ray.worker import GRACE_S, Worker, WorkerFacts
from chatlearn_ray.worker_spec import PluginChoice, WorkerSpec


class TrainerWorker(Worker):
    """One rank of a trainer."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._trainer: Trainer | None = None
        self._senders: dict[str, WeightSender] = {}
        self._transports: dict[str, str] = {}
        """Names the plugin of each sender, for messages."""
        self._port: ReservedPort | None = None

    @property
    def trainer(self) -> Trainer:
        assert self._trainer is not None, "setup comes first"
        return self._trainer

    async def network(self) -> str:
        """Names the loopback interface that this process sees: those that see the same reach each other on it."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"

    async def find_rendezvous(self, on_loopback: bool) -> str:
        """``tcp://host:port`` on this node, for all ranks to meet at; the port is kept free until ``setup`` ends."""
        self._release_port()
        self._port = ReservedPort()
        address = LOOPBACK if on_loopback else node_address()
        return f"tcp://[{address}]:{self._port.number}" if ":" in address else f"tcp://{address}:{self._port.number}"

    async def setup(self, rendezvous: str | None, secret: str | None) -> WorkerFacts:
        """Build the trainer and meet the other ranks, which know the same secret."""
        assert self.spec.plugin is not None
        self.context = replace(self.context, rendezvous=rendezvous, rendezvous_secret=secret)
        self._trainer = self.build(self.spec.plugin)
        try:
            await self.set_up(self.trainer.setup)
        finally:
            self._release_port()
        return replace(
            self.facts(),
            data_parallel_rank=self.trainer.data_parallel_rank,
            data_parallel_size=self.trainer.data_parallel_size,
        )

    async def compute(self, arrays: BatchArrays, request: OutputRequest) -> tuple[ComputedFacts, dict[str, Array]]:
        """Outputs of this rank's slice."""

        def compute() -> Outputs:
            batch = arrays.batch()
            outputs = self.trainer.compute(batch, request)
            check_outputs(outputs, batch, request, self.origin, whole=False)  # here their values are at hand
            return outputs

        return pack_outputs(await self.lane.run("compute", compute))

    async def measure(self, arrays: BatchArrays, function: Callable[[TrainBatch], Metrics]) -> Metrics:
        """What the function finds in this rank's slice."""
        return await self.lane.run("measure", lambda: function(arrays.batch()))

    async def update(self, arrays: BatchArrays, loss: Loss) -> Metrics:
        """One optimizer step over this rank's slice."""
        return await self.lane.run("update", lambda: self.trainer.update(arrays.batch(), loss))

    async def save(self, directory: Path) -> None:
        await self.lane.run("save", self.trainer.save, directory)

    async def load(self, directory: Path) -> None:
        await self.lane.run("load", self.trainer.load, directory)

    async def export_model(self, directory: Path) -> None:
        await self.lane.run("export_model", self.trainer.export_model, directory)

    async def move(self, action: MemoryAction, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """Offload or onload parts; what is live afterwards."""
        context = self.context
        return await self.lane.run(
            action, lambda: move(self.trainer, action, parts, role=context.role, worker=context.rank)
        )

    async def manifest(self, payload: Payload) -> WeightManifest:
        return await self.lane.run("manifest", self.trainer.manifest, payload)

    async def open_transport(self, key: str, plugin: PluginChoice) -> Endpoint:
        """Build this rank's sender."""
        record, options = plugin.find(self.registry, self.spec.driver_host)
        assert isinstance(record, WeightSyncSpec)
        self._senders[key] = self.registry.load_factory(record, "sender")(options, self.endpoint())
        self._transports[key] = f"weight sync {record.name!r} ({self.registry.origin(record)})"
        return self.endpoint()

    async def offer(self, key: str, plan: SyncPlan) -> SyncOffer:
        return checked_offer(self._senders[key].offer(plan), self._transports[key], self.context.rank)

    async def send(self, key: str, plan: SyncPlan) -> int:
        """Bytes sent."""
        send, limit = self._senders[key].send, plan.timeout_s + GRACE_S
        return await self.lane.run("send", send, plan, self.trainer, timeout_s=limit, setting="weight_sync.timeout_s")

    async def release(self, key: str, plan: SyncPlan) -> None:
        self._senders[key].release(plan)

    def _release_port(self) -> None:
        port, self._port = self._port, None
        if port is not None:
            port.close()

    async def close(self) -> None:
        """Close senders and trainer."""
        self._release_port()
        trainer, self._trainer = self._trainer, None
        senders, self._senders = self._senders, {}
        await self.close_all([*(sender.close for sender in senders.values()), *([trainer.close] if trainer else [])])


def node_address() -> str:
    """The address under which other nodes reach this one."""
    import ray

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray has no types here
    return address
