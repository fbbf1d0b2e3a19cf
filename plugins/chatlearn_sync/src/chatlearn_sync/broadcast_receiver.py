"""The generator's end of ``broadcast``: joins the senders' groups, or lets the engine's own processes join them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.protocols import ProcessGroupLoader, WeightLoader
from chatlearn_core.types import Endpoint, GroupRendezvous, SyncOffer, SyncRequest
from chatlearn_hosting.engine_side.groups import SenderGroup, join, tensors_in
from chatlearn_sync.arrival import Arrival
from chatlearn_sync.broadcast import NAME
from chatlearn_sync.checksum import load_and_verify
from chatlearn_sync.delivery import Delivery
from chatlearn_sync.flat_buffers import FlatBuffers, flat_limit
from chatlearn_sync.gpus import visible_gpus
from chatlearn_sync.intake import Intake, Source, offers_of
from chatlearn_sync.messages import ControlOffer, Message, error_text, store_secret
from chatlearn_sync.options import BroadcastOptions
from chatlearn_sync.shard_spec import ShardSpec
from chatlearn_sync.stream import describe_endpoint


class BroadcastReceiver:
    """Receives the buckets of all senders' groups concurrently."""

    def __init__(self, options: BroadcastOptions, endpoint: Endpoint) -> None:
        self._options = options
        self._endpoint = endpoint
        self._groups: dict[int, SenderGroup] = {}
        """Sender rank -> group that this process has joined."""
        self._joined: dict[int, str] = {}
        """Sender rank -> name of the group that the engine's processes have joined."""
        self._engine: ProcessGroupLoader | None = None
        self._buffers: dict[int, FlatBuffers] = {}

    async def receive(self, plan: SyncRequest, offers: Sequence[SyncOffer], loader: WeightLoader) -> int:
        """Load every bucket from every sender; the event loop stays free while waiting."""
        contents = offers_of(offers, plan, NAME)
        if plan.channel == "process_group":
            assert isinstance(loader, ProcessGroupLoader), "the generator declares 'process_group'"
            return await self._let_engine_receive(plan, contents, loader)
        intake = _FlatIntake(plan, self._endpoint, loader, self._options, self._groups, self._buffers)
        try:
            return await intake.run(contents)
        except BaseException:
            self.close()  # the progress of the other ranks is unknown
            raise

    async def _let_engine_receive(
        self, plan: SyncRequest, offers: Sequence[ControlOffer], loader: ProcessGroupLoader
    ) -> int:
        if self._engine is not loader:
            self._engine, self._joined = loader, {}  # another engine: it is in no group
        intake = _EngineIntake(plan, self._endpoint, loader, self._joined)
        try:
            return await intake.run(offers)
        except BaseException as error:
            joined, self._joined = self._joined, {}
            for name in joined.values():
                try:
                    await loader.leave_group(name)
                except Exception as second:
                    error.add_note(f"and the engine did not leave the group {name!r}: {second}")
            raise

    def close(self) -> None:
        """Leave every group and free the buffers."""
        groups, self._groups = self._groups, {}
        self._buffers = {}
        for group in groups.values():
            group.close()


class _FlatIntake(Intake):
    """This process is in the groups. It takes part to the end even if its loader fails, because others depend on it.

    The next bucket is awaited while the previous one arrives or is loaded, so that its sender never waits for this end.
    """

    acknowledges_later = True

    def __init__(
        self,
        plan: SyncRequest,
        endpoint: Endpoint,
        loader: WeightLoader,
        options: BroadcastOptions,
        groups: dict[int, SenderGroup],
        buffers: dict[int, FlatBuffers],
    ) -> None:
        super().__init__(plan, NAME, endpoint)
        self._delivery = Delivery(plan, loader, self.awaited)
        self._limit = flat_limit(plan, options.slot_mb << 20)
        self._groups = groups
        self._buffers = buffers
        self._loads: dict[tuple[int, int], asyncio.Task[None]] = {}
        """(sender rank, buffer) -> task that still reads the buffer."""
        self._turns: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Sender rank -> lock that keeps buckets in order if a later one arrives first."""
        self._failure: Exception | None = None

    def hello(self) -> Message:
        names = [group.name for group in self._groups.values()]
        return {"ranks": 1, "groups": names, "gpus": visible_gpus(self.endpoint.device)}

    async def run(self, offers: Sequence[ControlOffer]) -> int:
        try:
            return await super().run(offers)
        except WeightSyncError:
            if self._failure is not None:
                raise self._failure from None  # the cause of the sender's failure
            raise
        finally:
            for task in self._loads.values():
                task.cancel()
            await asyncio.gather(*self._loads.values(), return_exceptions=True)

    async def take(self, source: Source, message: Message) -> None:
        if "join" in message:
            await self._join(source, message)
            return
        rank, size = source.sender.rank, int(message["num_bytes"])
        group = self._groups[rank]
        buffers = self._buffers[rank]
        slot = buffers.slot(message["bucket"], size)
        if (rank, slot) in self._loads:
            await self._loads.pop((rank, slot))
        told = _Told()
        arrival = Arrival(group, buffers.get(slot, size), told.tell)
        self._loads[rank, slot] = asyncio.create_task(self._load(source, message, arrival, told))

    async def ended(self, source: Source) -> None:
        await self._delivery.sender_ended()

    async def settle(self) -> None:
        await asyncio.gather(*self._loads.values())
        if self._failure is not None:
            raise self._failure

    async def _join(self, source: Source, message: Message) -> None:
        rank = source.sender.rank
        if rank in self._groups:
            self._groups.pop(rank).close()
        group = (message["address"], message["join"], message["backend"], message["world_size"], message["first_rank"])
        secret = store_secret(source.offer.address)
        try:
            self._groups[rank] = await asyncio.to_thread(join, *group, self.plan.timeout_s, secret)
        except RuntimeError as error:
            raise WeightSyncError(
                f"{self.where}: cannot join the process group of sender {describe_endpoint(source.sender)} at "
                f"{message['address']}: {error}"
            ) from error
        device = self.endpoint.device if message["backend"] == "nccl" else "cpu"
        if rank not in self._buffers or not self._buffers[rank].fits(self._limit, device):
            self._buffers[rank] = FlatBuffers(self._limit, device)

    async def _load(self, source: Source, message: Message, arrival: Arrival, told: _Told) -> None:
        async with self._turns[source.sender.rank]:
            await self._arrived(source, message, arrival, told)
            source.say({"acknowledged": message["bucket"]})
            if self._failure is not None:
                return
            try:
                await self._load_arrived(source, message, arrival.tensor)
                self.num_bytes += arrival.tensor.numel()
            except Exception as error:
                self._failure = self._failure or error
                for one in self.sources:
                    one.say({"failed": error_text(error)})

    async def _load_arrived(self, source: Source, message: Message, flat: Tensor) -> None:
        rank = source.sender.rank
        specs = [ShardSpec.from_json(described) for described in message["tensors"]]
        named = tensors_in(flat, [(spec.name, spec.dtype, list(spec.shape)) for spec in specs])
        for spec in specs:
            self.check.admit_spec(spec)
        where = f"{self.where}, bucket {message['bucket']} of sender rank {rank}"
        shards = [spec.shard(tensor, rank) for spec, (_, tensor) in zip(specs, named, strict=True)]
        await load_and_verify(self._delivery.load(iter(shards), rank), named, message["checksums"], where)

    async def _arrived(self, source: Source, message: Message, arrival: Arrival, told: _Told) -> None:
        """Wait for a broadcast without a thread, because a thread blocked in a broadcast cannot be cancelled.

        Raises:
            WeightSyncError: the broadcast failed. The sender gets the error too, as it may wait for other receivers.
        """
        while not arrival.is_over:
            await told.wait(arrival.glance_s)
        try:
            arrival.wait()
        except RuntimeError as error:
            source.say({"failed": error_text(error)})
            raise WeightSyncError(
                f"{self.where}: the broadcast of bucket {message['bucket']} by sender "
                f"{describe_endpoint(source.sender)} failed: {error}. The sender or another receiver has ended or hangs"
            ) from error


class _Told:
    """Passes signals from a process group's thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def tell(self) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: no call waits any more
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, glance_s: float | None) -> None:
        """Wait for the signal, or at most ``glance_s``."""
        if glance_s is None:
            await self._event.wait()
        else:
            await asyncio.sleep(glance_s)


class _EngineIntake(Intake):
    """The engine's processes are in the groups; this process tells them what will arrive."""

    def __init__(
        self, plan: SyncRequest, endpoint: Endpoint, loader: ProcessGroupLoader, joined: dict[int, str]
    ) -> None:
        super().__init__(plan, NAME, endpoint)
        self._loader = loader
        self._joined = joined

    def hello(self) -> Message:
        ranks = self._loader.num_group_ranks
        gpus = visible_gpus(self.endpoint.device, ranks)
        return {"ranks": ranks, "groups": list(self._joined.values()), "gpus": gpus}

    async def take(self, source: Source, message: Message) -> None:
        rank = source.sender.rank
        if "join" in message:
            if rank in self._joined:
                await self._loader.leave_group(self._joined.pop(rank))
            rendezvous = GroupRendezvous(
                message["join"],
                message["address"],
                message["backend"],
                message["world_size"],
                message["first_rank"],
                self.plan.timeout_s,
                store_secret(source.offer.address),
            )
            await self._loader.join_group(rendezvous)
            self._joined[rank] = rendezvous.name
            return
        specs = [ShardSpec.from_json(described) for described in message["tensors"]]
        for spec in specs:
            self.check.admit_spec(spec)
        tensors = [spec.spec for spec in specs]
        try:
            await self._loader.load_broadcast(self._joined[rank], tensors, message["checksums"])
        except WeightSyncError as error:
            raise WeightSyncError(
                f"{self.where}, bucket {message['bucket']} of sender {describe_endpoint(source.sender)}: {error}"
            ) from error
        self.num_bytes += int(message["num_bytes"])
