"""Transport ``shared_memory``: generators read tensors in memory that trainer ranks on their host share.

Each sender rank alternates between two blocks of anonymous shared memory: while receivers read one, it gathers the next
tensors into the other. Receivers open a block through the sender's file descriptor, and the kernel frees it with the
last process that maps it, so no crash leaves memory behind. Blocks are kept from sync to sync, because the first touch
of a page costs far more than copying it.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chatlearn_core.exceptions import ChatLearnError, WeightSyncError
from chatlearn_core.protocols import MemoryHandleLoader, Trainer, WeightLoader
from chatlearn_core.types import Endpoint, MemoryHandle, SyncOffer, SyncRequest, TensorPlace, WeightShard
from chatlearn_hosting.shared_block import SharedBlock
from chatlearn_sync.checksum import copy_with_checksum, load_and_verify
from chatlearn_sync.delivery import Delivery
from chatlearn_sync.hub import Hub
from chatlearn_sync.intake import Intake, Source, offers_of
from chatlearn_sync.messages import Message
from chatlearn_sync.open_hubs import OpenHubs
from chatlearn_sync.options import SharedMemoryOptions
from chatlearn_sync.shard_spec import ShardSpec
from chatlearn_sync.stream import StreamCheck, bucket_limit, describe, describe_endpoint, owned, step_through, stream
from chatlearn_sync.within_hosts import offers_here, on_host_of, ranks_sent_by

NAME = "shared_memory"
PAGE_BYTES = mmap.PAGESIZE
PARTS = 8
"""Number of blocks into which a small model is divided: engines load few large blocks faster than many small ones."""
LEAST_FILL_BYTES = 16 << 20
"""Minimum fill of a block, bytes, once fills have grown to their full size."""
FIRST_FILL_BYTES = 4 << 20
"""Fill of the first block of a sync, bytes; small, because receivers wait for it. Each further fill doubles."""


@dataclass(slots=True, eq=False)
class Slot:
    """One block of a sender, its contents, and the bucket that must be acknowledged before it is refilled."""

    block: SharedBlock
    fill_bytes: int = 0
    """Size at which the block counts as full, bytes; a single larger tensor is accepted."""
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    """Random key: distinguishes this block from an earlier one with the same path."""
    bucket: int = -1
    """Number of the bucket that this block last carried; -1: none in this sync."""
    held_bytes: int = 0
    specs: list[ShardSpec] = field(default_factory=list)
    """Tensors and boxes in the block."""
    checksums: list[int] = field(default_factory=list)
    """Checksums of ``specs``, in order; empty without ``verify_checksums``."""

    def add(self, shard: WeightShard, *, with_checksum: bool) -> bool:
        """Copy a tensor into the block; False if the block is full."""
        name, tensor = shard.name, shard.tensor
        if self.held_bytes and self.held_bytes + tensor.nbytes > self.fill_bytes:
            return False
        if with_checksum:
            target = self.block.reserve(name, tensor)
            if target is None:
                return False
            self.checksums.append(copy_with_checksum(tensor, target))
        elif not self.block.add(name, tensor):
            return False
        self.specs.append(ShardSpec.of(shard))
        self.held_bytes += tensor.nbytes
        return True

    def clear(self) -> None:
        """Empty the block."""
        self.block.clear()
        self.held_bytes, self.specs, self.checksums = 0, [], []


class Mapping:
    """A block mapped into this process; unmapped once the last reference to ``contents`` is gone."""

    def __init__(self, path: str, num_bytes: int) -> None:
        descriptor = os.open(path, os.O_RDWR)
        try:
            self.contents = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        finally:
            os.close(descriptor)
        self.num_bytes = num_bytes


class SharedMemorySender:
    """Packs this rank's tensors into blocks, and keeps each block unchanged until every receiver has read it."""

    def __init__(self, options: SharedMemoryOptions, endpoint: Endpoint) -> None:
        self._options = options
        self._endpoint = endpoint
        self._hubs = OpenHubs(NAME, endpoint)
        self._slots: list[Slot] = []
        self._large: Slot | None = None
        """Block for tensors that are larger than a slot."""

    @property
    def held_bytes(self) -> int:
        """Size of the shared memory that this sender holds, bytes."""
        slots = [*self._slots, *([self._large] if self._large else [])]
        return sum(slot.block.num_bytes for slot in slots)

    def offer(self, plan: SyncRequest) -> SyncOffer:
        """Listen for the receivers.

        Raises:
            WeightSyncError: a receiver is on a host without a sender.
        """
        return self._hubs.open(on_host_of(self._endpoint, plan, NAME))

    def send(self, plan: SyncRequest, trainer: Trainer) -> int:
        """Stream this rank's tensors; returns after every receiver on its host has loaded all of them.

        Returns:
            Number of bytes sent, counted once for all receivers.
        """
        hub = self._hubs.of(plan)
        check = StreamCheck(plan.manifest, f"{describe(plan, NAME)}, sender {describe_endpoint(self._endpoint)}")
        with hub.sending():
            try:
                boxes = plan.export == "boxes"
                shards = owned(stream(plan, trainer), ranks_sent_by(self._endpoint, plan), check, boxes=boxes)
                if hub.is_alone:
                    return step_through(shards)
                sent = self._send(plan, shards, hub)
            except Exception:
                with contextlib.suppress(ChatLearnError):
                    hub.wait_connected()  # receivers that are still connecting then get the error
                raise
        return sent

    def _send(self, plan: SyncRequest, shards: Iterator[WeightShard], hub: Hub) -> int:
        number = sent = 0
        for slot in self._filled(plan, shards, hub):
            if number == 0:
                hub.wait_connected()  # the first block fills while the receivers connect
            hub.say(self._announcement(slot, number))
            slot.bucket = number
            number += 1
            sent += sum(spec.num_bytes for spec in slot.specs)
        hub.wait_connected()  # a rank that owns no tensor waits here
        hub.end(number)
        return sent

    def release(self, plan: SyncRequest) -> None:
        """Close the control path; a receiver or a send still in progress raises. Blocks stay for the next sync."""
        self._hubs.release(plan)

    def close(self) -> None:
        """Close every control path and free the blocks."""
        self._hubs.close()
        for slot in [*self._slots, *([self._large] if self._large else [])]:
            slot.block.close()
        self._slots, self._large = [], None

    def _filled(self, plan: SyncRequest, shards: Iterator[WeightShard], hub: Hub) -> Iterator[Slot]:
        """Yield slots as they fill. A slot is refilled once every receiver has acknowledged its last bucket."""
        size = self._slot_bytes(plan)
        if any(slot.block.num_bytes != size for slot in self._slots):
            for slot in self._slots:
                slot.block.close()
            self._slots = []
        while len(self._slots) < 2:
            self._slots.append(Slot(SharedBlock(size)))
        for slot in [*self._slots, *([self._large] if self._large else [])]:
            slot.bucket = -1
        turn, checks = 0, self._options.verify_checksums
        most, fill_bytes = self._fill_bytes(plan), FIRST_FILL_BYTES
        current = self._emptied(self._slots[turn], hub, min(most, fill_bytes))
        for shard in shards:
            hub.check()
            if (num_bytes := shard.tensor.nbytes) > size:
                if self._large is None:
                    self._large = Slot(SharedBlock(_whole_pages(num_bytes)))
                self._emptied(self._large, hub, num_bytes).add(shard, with_checksum=checks)
                yield self._large
            elif not current.add(shard, with_checksum=checks):
                yield current
                turn, fill_bytes = 1 - turn, fill_bytes * 2
                current = self._emptied(self._slots[turn], hub, min(most, fill_bytes))
                current.add(shard, with_checksum=checks)
            del shard  # its tensor may have been gathered for this stream
        if current.specs:
            yield current

    def _emptied(self, slot: Slot, hub: Hub, fill_bytes: int) -> Slot:
        if slot.bucket >= 0:
            hub.wait_acknowledged(slot.bucket)
        slot.clear()
        slot.fill_bytes = fill_bytes
        return slot

    def _fill_bytes(self, plan: SyncRequest) -> int:
        """Fill of a block, bytes, once fills have grown to their full size."""
        most = self._options.slot_mb << 20
        return min(most, max(plan.manifest.num_bytes // PARTS, LEAST_FILL_BYTES))

    def _slot_bytes(self, plan: SyncRequest) -> int:
        """Block size, bytes: holds the largest tensor, so that large tensors overlap too, within the bucket limit."""
        largest = max((spec.num_bytes for spec in plan.manifest.tensors.values()), default=0)
        wanted = max(largest, self._fill_bytes(plan))
        return _whole_pages(min(wanted, bucket_limit(plan) // PAGE_BYTES * PAGE_BYTES))

    def _announcement(self, slot: Slot, number: int) -> Message:
        handle = slot.block.handle()
        return {
            "bucket": number,
            "slot": slot.key,
            "path": handle.content,
            "num_bytes": handle.num_bytes,
            "tensors": [spec.to_json() for spec in slot.specs],
            "offsets": [place.offset for place in handle.tensors],
            "checksums": slot.checksums if self._options.verify_checksums else None,
        }


class SharedMemoryReceiver:
    """Passes the senders' blocks on: as handles to an engine that opens them itself, otherwise as mapped tensors."""

    def __init__(self, options: SharedMemoryOptions, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._mappings: dict[str, Mapping] = {}

    async def receive(self, plan: SyncRequest, offers: Sequence[SyncOffer], loader: WeightLoader) -> int:
        """Load every block from every sender; returns the number of bytes. The event loop stays free while waiting."""
        intake = _BlockIntake(plan, self._endpoint, loader, self._mappings)
        received = await intake.run(offers_here(offers_of(offers, plan, NAME), self._endpoint))
        self._mappings = {key: self._mappings[key] for key in intake.seen if key in self._mappings}
        return received

    def close(self) -> None:
        """Drop the mappings of the senders' blocks."""
        self._mappings = {}


class _BlockIntake(Intake):
    def __init__(
        self, plan: SyncRequest, endpoint: Endpoint, loader: WeightLoader, mappings: dict[str, Mapping]
    ) -> None:
        super().__init__(plan, NAME, endpoint)
        self.seen: set[str] = set()
        self._loader = loader
        self._mappings = mappings
        self._delivery = Delivery(plan, loader, self.awaited)
        self._loading = asyncio.Lock()

    async def take(self, source: Source, message: Message) -> None:
        rank = source.sender.rank
        specs = [ShardSpec.from_json(described) for described in message["tensors"]]
        for spec in specs:
            self.check.admit_spec(spec)
        places = [TensorPlace(spec.spec, offset) for spec, offset in zip(specs, message["offsets"], strict=True)]
        checksums: list[int] | None = message["checksums"]
        where = f"{self.where}, bucket {message['bucket']} of sender rank {rank}"
        views = _views(self._contents(source, message), places) if checksums is not None else iter(())
        if self.plan.channel == "memory_handles":
            load = self._load_handle(MemoryHandle("file", message["path"], message["num_bytes"], tuple(places)))
        else:
            named = _views(self._contents(source, message), places)
            shards = (spec.shard(tensor, rank) for spec, (_, tensor) in zip(specs, named, strict=True))
            load = self._delivery.load(shards, rank)
        await load_and_verify(load, views, checksums, where)
        self.num_bytes += sum(spec.num_bytes for spec in specs)

    async def ended(self, source: Source) -> None:
        await self._delivery.sender_ended()

    async def _load_handle(self, handle: MemoryHandle) -> None:
        assert isinstance(self._loader, MemoryHandleLoader), "the generator declares 'memory_handles'"
        async with self._loading:
            await self._loader.load_handles(handle)

    def _contents(self, source: Source, message: Message) -> Tensor:
        key = message["slot"]
        self.seen.add(key)
        mapping = self._mappings.get(key)
        if mapping is None or mapping.num_bytes != message["num_bytes"]:
            try:
                mapping = self._mappings[key] = Mapping(message["path"], message["num_bytes"])
            except OSError as error:
                raise WeightSyncError(
                    f"{self.where}: a block of sender {describe_endpoint(source.sender)} cannot be opened at "
                    f"{message['path']}: {error}. Either its process has ended, or it runs under another user or in "
                    "another container, where shared memory is out of reach"
                ) from error
        return mapping.contents


def _views(contents: Tensor, places: Sequence[TensorPlace]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) lazily, so that no view outlives the acknowledgement."""
    return ((place.spec.name, view_of(contents, place)) for place in places)


def view_of(contents: Tensor, place: TensorPlace) -> Tensor:
    """Return one tensor of a block as a view of the block's bytes."""
    spec = place.spec
    data = contents[place.offset : place.offset + spec.num_bytes]
    return data.view(getattr(torch, spec.dtype)).view(spec.shape)


def _whole_pages(num_bytes: int) -> int:
    return max(PAGE_BYTES, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
