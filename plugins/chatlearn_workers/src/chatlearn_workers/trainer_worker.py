"""One rank of a trainer, in its own process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from chatlearn_core.plugins.records import WeightSyncSpec
from chatlearn_core.protocols import (
    BackgroundSavingTrainer,
    Derive,
    Loss,
    MemoryAction,
    MemoryEvent,
    MemoryPart,
    Trainer,
    WeightLoader,
    WeightReceiver,
    WeightSender,
)
from chatlearn_core.runtime.outputs import check_outputs
from chatlearn_core.runtime.serial_executor import SerialExecutor
from chatlearn_core.types import (
    Derived,
    Endpoint,
    FileFacts,
    Metrics,
    OutputRequest,
    Outputs,
    Payload,
    SyncOffer,
    SyncReceipt,
    SyncRequest,
    WeightManifest,
)
from chatlearn_core.types.array_ref import Array
from chatlearn_hosting.engine_side.private_store import LOOPBACK
from chatlearn_hosting.reserved_port import ReservedPort
from chatlearn_runtime_kit.offload import move
from chatlearn_runtime_kit.sync_answers import SEND, checked_num_bytes, checked_offer
from chatlearn_runtime_kit.weight_ends import loader_of, take_weights, unfit_tensors
from chatlearn_workers.arrays import BatchArrays
from chatlearn_workers.outputs import ComputedFacts, DerivedFacts, pack_derived, pack_outputs
from chatlearn_workers.worker import GRACE_S, NodeAddress, Worker, WorkerFacts
from chatlearn_workers.worker_spec import PluginChoice, WorkerSpec


@dataclass(slots=True, frozen=True)
class _Receiving:
    """What a rank has that follows another trainer."""

    receiver: WeightReceiver
    loader: WeightLoader
    transport: str
    """Names the plugin, for messages."""


class TrainerWorker(Worker):
    """One rank of a trainer."""

    def __init__(self, spec: WorkerSpec, node_address: NodeAddress) -> None:
        super().__init__(spec, node_address)
        self._trainer: Trainer | None = None
        self._senders: dict[str, WeightSender] = {}
        self._transports: dict[str, str] = {}
        """Name of each sender's plugin, for messages."""
        self._receiving: dict[str, _Receiving] = {}
        self._port: ReservedPort | None = None

    @property
    def trainer(self) -> Trainer:
        assert self._trainer is not None, "setup comes first"
        return self._trainer

    async def network(self) -> str:
        """Identifies this process's loopback interface: processes with the same one reach each other on it."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"

    async def find_rendezvous(self, on_loopback: bool) -> str:
        """``tcp://host:port`` on this node where all ranks meet; the port is reserved until ``setup`` ends."""
        self._release_port()
        self._port = ReservedPort()
        address = LOOPBACK if on_loopback else self.node_address()
        return f"tcp://[{address}]:{self._port.number}" if ":" in address else f"tcp://{address}:{self._port.number}"

    async def setup(self, rendezvous: str | None, secret: str | None) -> WorkerFacts:
        """Build the trainer and join the other ranks, which use the same secret."""
        assert self.spec.plugin is not None
        self.context = replace(self.context, rendezvous=rendezvous, rendezvous_secret=secret)
        self._trainer = self.build(self.spec.plugin)
        try:
            await self.set_up(self.trainer)
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
            # The values are plain only here.
            check_outputs(outputs, batch, request, self.origin, self.registry.outputs, whole=False)
            return {name: values for name, values in outputs.items() if name in request.names}

        return pack_outputs(await self.executor.run("compute", compute), self.registry.outputs)

    async def derive(self, arrays: BatchArrays, function: Derive) -> tuple[DerivedFacts, dict[str, Array]]:
        """The function's result for this rank's slice."""

        def derive() -> Derived:
            batch = arrays.batch()
            return function(batch) if batch.num_sequences else Derived()

        return pack_derived(await self.executor.run("derive", derive))

    async def update(self, arrays: BatchArrays, loss: Loss) -> Metrics:
        """One optimizer step over this rank's slice."""
        return await self.executor.run("update", lambda: self.trainer.update(arrays.batch(), loss))

    async def save(self, directory: Path) -> Mapping[str, FileFacts]:
        """Write this rank's part of a checkpoint; returns facts about its files."""
        return await self.executor.run("save", self.trainer.save, directory)

    async def begin_save(self, directory: Path) -> bool:
        """Copy this rank's state and begin to write it; False if the trainer cannot."""
        if not isinstance(self.trainer, BackgroundSavingTrainer):
            return False
        await self.executor.run("save", self.trainer.begin_save, directory)
        return True

    async def finish_save(self) -> Mapping[str, FileFacts]:
        """Wait until this rank has written, beside its other calls; returns facts about its files."""
        assert isinstance(self.trainer, BackgroundSavingTrainer)
        waiting = SerialExecutor(self.executor.name, self.executor.timeout_s)
        try:
            return await waiting.run("save", self.trainer.finish_save)
        finally:
            waiting.stop()

    async def load(self, directory: Path) -> None:
        await self.executor.run("load", self.trainer.load, directory)

    async def load_model(self, directory: Path, decay: float) -> None:
        await self.executor.run("load_model", lambda: self.trainer.load_model(directory, decay=decay))

    async def export_model(self, directory: Path) -> None:
        await self.executor.run("export_model", self.trainer.export_model, directory)

    async def move(self, action: MemoryAction, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """Offload or onload parts; returns the memory in use afterwards."""
        context = self.context
        return await self.executor.run(
            action, lambda: move(self.trainer, action, parts, role=context.role, worker=context.rank)
        )

    async def manifest(self, payload: Payload) -> WeightManifest | None:
        """The manifest from rank 0; other ranks take part and return None, so that it is sent once."""
        found = await self.executor.run("manifest", self.trainer.manifest, payload)
        return found if self.context.rank == 0 else None

    async def open_transport(self, key: str, plugin: PluginChoice) -> Endpoint:
        """Build this rank's sender, replacing an existing one."""
        record, options = plugin.find(self.registry, self.spec.driver_host)
        assert isinstance(record, WeightSyncSpec)
        if (former := self._senders.pop(key, None)) is not None:
            former.close()
        self._senders[key] = self.registry.load_factory(record, "sender")(options, self.endpoint())
        self._transports[key] = f"weight sync {record.name!r} ({self.registry.origin(record)})"
        return self.endpoint()

    async def offer(self, key: str, request: SyncRequest) -> SyncOffer:
        return checked_offer(self._senders[key].offer(request), self._transports[key], self.context.rank)

    async def send(self, key: str, request: SyncRequest) -> int:
        """Bytes sent."""
        send, limit = self._senders[key].send, request.timeout_s + GRACE_S
        sent = await self.executor.run(
            "send", send, request, self.trainer, timeout_s=limit, setting="weight_sync.timeout_s"
        )
        return checked_num_bytes(sent, self._transports[key], SEND)

    async def release(self, key: str, request: SyncRequest) -> None:
        self._senders[key].release(request)

    async def open_receiver(self, key: str, plugin: PluginChoice, decay: float) -> Endpoint | None:
        """Build this rank's receiver, in place of the one that it has; None where the model cannot take tensors one
        at a time. Each rank receives for itself: as an endpoint it is the replica of its number.
        """
        loader = loader_of(self.trainer, decay, self.origin)
        if loader is None:
            return None
        record, options = plugin.find(self.registry, self.spec.driver_host)
        assert isinstance(record, WeightSyncSpec)
        if (former := self._receiving.pop(key, None)) is not None:
            former.receiver.close()
        endpoint = replace(self.endpoint(), replica=self.context.rank, rank=0)
        receiver = self.registry.load_factory(record, "receiver")(options, endpoint)
        transport = f"weight sync {record.name!r} ({self.registry.origin(record)})"
        self._receiving[key] = _Receiving(receiver, loader, transport)
        return endpoint

    async def unfit(self, key: str, request: SyncRequest) -> list[str]:
        """See ``unfit_tensors``."""
        return unfit_tensors(self._receiving[key].loader, request)

    async def begin_taking(self, key: str, request: SyncRequest) -> None:
        """Check the manifest and make ready for new weights."""
        await self._receiving[key].loader.begin(request.policy_version, request.manifest)

    async def take(self, key: str, request: SyncRequest, offers: Sequence[SyncOffer]) -> SyncReceipt:
        """See ``take_weights``."""
        own = self._receiving[key]
        return await take_weights(own.receiver, own.loader, request, offers, self.context.rank, own.transport)

    async def fail_taking(self, key: str, reason: str) -> None:
        """Give up what ``begin_taking`` began."""
        await self._receiving[key].loader.fail(reason)

    def _release_port(self) -> None:
        port, self._port = self._port, None
        if port is not None:
            port.close()

    async def close(self) -> None:
        """Close senders, receivers and trainer."""
        self._release_port()
        trainer, self._trainer = self._trainer, None
        senders, self._senders = self._senders, {}
        receiving, self._receiving = self._receiving, {}
        closers = [*(sender.close for sender in senders.values()), *(own.receiver.close for own in receiving.values())]
        await self.close_all([*closers, *([trainer.close] if trainer else [])])
