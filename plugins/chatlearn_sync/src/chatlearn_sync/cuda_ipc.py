"""Transport ``cuda_ipc``: trainer ranks and engine ranks share GPUs, and an engine reads where its trainer rank wrote.

Every sender rank has every gathered tensor on its own GPU, so every rank packs all of them into blocks of its GPU, and
an engine's rank opens the block of the GPU it runs on. The streams are packed alike on all ranks: bucket ``n`` of each
holds the same tensors at the same offsets, and goes to the engine as one handle with a block for each GPU. Bytes never
leave their GPU.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.protocols import MemoryHandleLoader, Trainer, WeightLoader
from chatlearn_core.types import Endpoint, MemoryHandle, SyncOffer, SyncRequest, TensorPlace
from chatlearn_hosting.shared_block import ALIGNMENT
from chatlearn_sync.flat_buffers import IN_FLIGHT, spec_of
from chatlearn_sync.hub import Hub
from chatlearn_sync.intake import Intake, Source, offers_of
from chatlearn_sync.messages import Message
from chatlearn_sync.open_hubs import OpenHubs
from chatlearn_sync.options import CudaIpcOptions
from chatlearn_sync.shard_spec import ShardSpec
from chatlearn_sync.stream import StreamCheck, describe, describe_endpoint, owned, step_through, stream
from chatlearn_sync.within_hosts import offers_here, on_host_of

NAME = "cuda_ipc"
Export = Callable[[Tensor], tuple[str, Any]]
"""A block -> (UUID of its GPU, what rebuilds it in another process)."""


def export_block(block: Tensor) -> tuple[str, Any]:
    """What another process needs to open a block of GPU memory."""
    return str(torch.cuda.get_device_properties(block.device).uuid), reduce_tensor(block)  # type: ignore[no-untyped-call]  # torch has no types here


@dataclass(slots=True, eq=False)
class Block:
    """GPU memory that is filled, sent, and filled again once everyone has read it.

    It outlives a sync and is exported once: torch gives memory back whose handle went out only when every handle was
    opened and closed, and an engine without a rank on this GPU opens none.
    """

    memory: Tensor
    exported: str | None = None
    """What rebuilds it in another process, pickled."""
    bucket: int = -1
    """The bucket it was last sent with."""
    places: list[TensorPlace] = field(default_factory=list)
    used: int = 0

    def add(self, name: str, tensor: Tensor) -> bool:
        """Copy a tensor into the block; False if there is no room."""
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        if start + tensor.nbytes > self.memory.numel():
            return False
        target = self.memory[start : start + tensor.nbytes]
        target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self.places.append(TensorPlace(spec_of(name, tensor), start))
        self.used = start + tensor.nbytes
        return True

    def clear(self) -> None:
        """Make room."""
        self.places, self.used = [], 0


class CudaIpcSender:
    """Packs every tensor into blocks of this rank's GPU."""

    def __init__(self, options: CudaIpcOptions, endpoint: Endpoint, export: Export = export_block) -> None:
        self._options = options
        self._endpoint = endpoint
        self._export = export
        self._blocks: list[Block] = []
        self._hubs = OpenHubs(NAME, endpoint)

    def offer(self, plan: SyncRequest) -> SyncOffer:
        """Listen for the receivers.

        Raises:
            WeightSyncError: a receiver is on a host without a sender.
        """
        return self._hubs.open(on_host_of(self._endpoint, plan, NAME))

    def send(self, plan: SyncRequest, trainer: Trainer) -> int:
        """Stream every tensor into this GPU's blocks; returns after every receiver loaded all of them.

        Raises:
            WeightSyncError: the trainer's tensors are not on a GPU, or as for every transport.
        """
        hub = self._hubs.of(plan)
        where = f"{describe(plan, NAME)}, sender {describe_endpoint(self._endpoint)}"
        check = StreamCheck(plan.manifest, where)
        with hub.sending():
            if hub.is_alone:
                return step_through(stream(plan, trainer))
            hub.wait_connected()
            number = sent = 0
            for block in self._filled(plan, trainer, check, hub):
                if block.memory.device.type == "cuda":
                    torch.cuda.synchronize(block.memory.device)  # the other process does not know of this one's streams
                hub.say(self._announcement(block, number, where))
                block.bucket = number
                number += 1
                sent += sum(place.spec.num_bytes for place in block.places)
            check.complete()
            hub.end(number)
        return sent

    def release(self, plan: SyncRequest) -> None:
        """Close the control path; a receiver or a send that is still at it raises."""
        self._hubs.release(plan)

    def close(self) -> None:
        """Close every control path and let go of the blocks."""
        self._hubs.close()
        self._blocks = []

    def _filled(self, plan: SyncRequest, trainer: Trainer, check: StreamCheck, hub: Hub) -> Iterator[Block]:
        """Blocks as they get full; which tensors share one depends on the plan alone, so that all ranks agree."""
        turn, size = 0, self._block_bytes(plan)
        for block in self._blocks:
            block.bucket = -1
            block.clear()
        blocks: list[Block] = []
        for shard in owned(stream(plan, trainer), {end.rank for end in plan.senders}, check):
            hub.check()
            tensor = shard.tensor
            if not blocks:
                blocks = self._blocks_on(tensor.device, size)
            if not blocks[turn].add(shard.name, tensor):
                yield blocks[turn]
                turn = 1 - turn
                if blocks[turn].bucket >= 0:
                    hub.wait_acknowledged(blocks[turn].bucket)
                blocks[turn].clear()
                added = blocks[turn].add(shard.name, tensor)
                assert added, "a block holds the largest tensor"
        if blocks and blocks[turn].places:
            yield blocks[turn]

    def _blocks_on(self, device: torch.device, size: int) -> list[Block]:
        if any((block.memory.device, block.memory.numel()) != (device, size) for block in self._blocks):
            self._blocks = []
        if not self._blocks:
            self._blocks = [Block(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(2)]
        return self._blocks

    def _block_bytes(self, plan: SyncRequest) -> int:
        """What ``bucket_bytes`` has room for, and the largest tensor at least."""
        largest = max((spec.num_bytes for spec in plan.manifest.tensors.values()), default=0)
        return max(largest, min(self._options.block_mb << 20, plan.bucket_bytes // IN_FLIGHT), 1)

    def _announcement(self, block: Block, number: int, where: str) -> Message:
        try:
            if block.exported is None:
                block.exported = base64.b64encode(pickle.dumps(self._export(block.memory))).decode()
        except (RuntimeError, ValueError, AssertionError) as error:
            raise WeightSyncError(
                f"{where}: its block on {block.memory.device} cannot be shared by CUDA IPC: {error}. The trainer must "
                "be on a GPU; elsewhere use 'shared_memory' or 'broadcast'"
            ) from error
        return {
            "bucket": number,
            "block": block.exported,
            "num_bytes": block.memory.numel(),
            "tensors": [[p.spec.name, p.spec.dtype, list(p.spec.shape)] for p in block.places],
            "offsets": [p.offset for p in block.places],
        }


class CudaIpcReceiver:
    """Puts the blocks of all sender ranks together, one handle a bucket, and hands them to the engine."""

    def __init__(self, options: CudaIpcOptions, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def receive(self, plan: SyncRequest, offers: Sequence[SyncOffer], loader: WeightLoader) -> int:
        """Load every bucket; the event loop stays free while waiting."""
        assert isinstance(loader, MemoryHandleLoader), "the generator declares 'memory_handles'"
        contents = offers_here(offers_of(offers, plan, NAME), self._endpoint)
        return await _HandleIntake(plan, self._endpoint, loader, len(contents)).run(contents)

    def close(self) -> None:
        """Nothing is held between syncs."""


@dataclass(slots=True, eq=False)
class Meeting:
    """One bucket, while the announcements of all sender ranks come in."""

    blocks: dict[str, Any] = field(default_factory=dict)
    num_announced: int = 0
    tensors: list[Any] = field(default_factory=list)
    loaded: asyncio.Event = field(default_factory=asyncio.Event)


class _HandleIntake(Intake):
    def __init__(self, plan: SyncRequest, endpoint: Endpoint, loader: MemoryHandleLoader, num_senders: int) -> None:
        super().__init__(plan, NAME, endpoint)
        self._loader = loader
        self._num_senders = num_senders
        self._meetings: dict[int, Meeting] = {}

    async def take(self, source: Source, message: Message) -> None:
        """The rank that comes last loads the bucket for all; the others' blocks are acknowledged after that."""
        number = int(message["bucket"])
        meeting = self._meetings.setdefault(number, Meeting())
        # A pickle, from the very process whose address the offer gave.
        uuid, rebuild = pickle.loads(base64.b64decode(message["block"]))
        if meeting.tensors and meeting.tensors != message["tensors"]:
            raise WeightSyncError(
                f"{self.where}: bucket {number} of sender rank {source.sender.rank} holds other tensors than those of "
                "the ranks before it; all ranks must stream alike"
            )
        meeting.tensors = message["tensors"]
        meeting.blocks[uuid] = rebuild
        meeting.num_announced += 1
        if meeting.num_announced < self._num_senders:
            await meeting.loaded.wait()
            return
        specs = [ShardSpec.from_json(described) for described in meeting.tensors]
        for spec in specs:
            self.check.admit_spec(spec)
        places = [TensorPlace(spec.spec, offset) for spec, offset in zip(specs, message["offsets"], strict=True)]
        await self._loader.load_handles(
            MemoryHandle("cuda_ipc", meeting.blocks, int(message["num_bytes"]), tuple(places))
        )
        self.num_bytes += sum(place.spec.num_bytes for place in places)
        del self._meetings[number]
        meeting.loaded.set()
