"""Transport ``cuda_ipc``: an engine rank reads GPU memory that the trainer rank on the same GPU wrote.

After a gather, every sender rank has all tensors on its own GPU. Each packs them into blocks of its GPU's memory, and
an engine rank opens the block on the GPU it runs on. All ranks pack their streams identically: bucket ``n`` holds the
same tensors at the same offsets on every rank, and reaches the engine as one handle with one block per GPU. No tensor
leaves its GPU.
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
"""Function: block -> (UUID of its GPU, picklable description from which another process opens the block)."""


def export_block(block: Tensor) -> tuple[str, Any]:
    """Return the UUID of the block's GPU and the CUDA IPC handle with which another process opens the block."""
    return str(torch.cuda.get_device_properties(block.device).uuid), reduce_tensor(block)  # type: ignore[no-untyped-call]  # torch has no types here


@dataclass(slots=True, eq=False)
class Block:
    """GPU memory that is filled, sent, and refilled once every receiver has read it.

    A block outlives a sync and is exported once: torch frees exported memory only after another process has opened
    and closed every handle, and an engine without a rank on this GPU never opens one.
    """

    memory: Tensor
    exported: str | None = None
    """Pickled handle, base64; None: not exported yet."""
    bucket: int = -1
    """Number of the bucket that this block last carried; -1: none in this sync."""
    places: list[TensorPlace] = field(default_factory=list)
    used: int = 0

    def add(self, name: str, tensor: Tensor) -> bool:
        """Copy a tensor into the block; False if it does not fit."""
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        if start + tensor.nbytes > self.memory.numel():
            return False
        target = self.memory[start : start + tensor.nbytes]
        target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self.places.append(TensorPlace(spec_of(name, tensor), start))
        self.used = start + tensor.nbytes
        return True

    def clear(self) -> None:
        """Empty the block."""
        self.places, self.used = [], 0


class CudaIpcSender:
    """Packs every tensor into blocks of memory on this rank's GPU."""

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
        """Stream every tensor into this GPU's blocks; returns the bytes sent, once every receiver loaded them all.

        Raises:
            WeightSyncError: the trainer's tensors are not on a GPU, the stream differs from the manifest, or no
                receiver remains.
            BackendTimeoutError: no receiver answered in time.
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
                    torch.cuda.synchronize(block.memory.device)  # CUDA streams do not order work between processes
                hub.say(self._announcement(block, number, where))
                block.bucket = number
                number += 1
                sent += sum(place.spec.num_bytes for place in block.places)
            check.complete()
            hub.end(number)
        return sent

    def release(self, plan: SyncRequest) -> None:
        """Close the control path; a receiver or a send still in progress raises."""
        self._hubs.release(plan)

    def close(self) -> None:
        """Close every control path and drop the blocks."""
        self._hubs.close()
        self._blocks = []

    def _filled(self, plan: SyncRequest, trainer: Trainer, check: StreamCheck, hub: Hub) -> Iterator[Block]:
        """Yield blocks as they fill. The plan alone decides which tensors share a block, so all ranks agree."""
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
        """Block size, bytes: ``block_mb`` within the share of ``bucket_bytes``, but at least the largest tensor."""
        largest = max((spec.num_bytes for spec in plan.manifest.tensors.values()), default=0)
        return max(largest, min(self._options.block_mb << 20, plan.bucket_bytes // IN_FLIGHT), 1)

    def _announcement(self, block: Block, number: int, where: str) -> Message:
        try:
            if block.exported is None:
                block.exported = base64.b64encode(pickle.dumps(self._export(block.memory))).decode()
        except (RuntimeError, ValueError, AssertionError) as error:
            raise WeightSyncError(
                f"{where}: its block on {block.memory.device} cannot be shared by CUDA IPC: {error}. The trainer must "
                "run on a GPU; otherwise set weight_sync.backend to 'shared_memory' or 'broadcast'"
            ) from error
        return {
            "bucket": number,
            "block": block.exported,
            "num_bytes": block.memory.numel(),
            "tensors": [[p.spec.name, p.spec.dtype, list(p.spec.shape)] for p in block.places],
            "offsets": [p.offset for p in block.places],
        }


class CudaIpcReceiver:
    """Combines the blocks of all sender ranks into one handle per bucket and passes it to the engine."""

    def __init__(self, options: CudaIpcOptions, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def receive(self, plan: SyncRequest, offers: Sequence[SyncOffer], loader: WeightLoader) -> int:
        """Load every bucket; returns the number of bytes. The event loop stays free while waiting."""
        assert isinstance(loader, MemoryHandleLoader), "the generator declares 'memory_handles'"
        contents = offers_here(offers_of(offers, plan, NAME), self._endpoint)
        return await _HandleIntake(plan, self._endpoint, loader, len(contents)).run(contents)

    def close(self) -> None:
        """Do nothing: a receiver holds nothing between syncs."""


@dataclass(slots=True, eq=False)
class Meeting:
    """One bucket while the announcements of all sender ranks arrive."""

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
        """Collect the announcements of one bucket; the last one to arrive loads the bucket, then all return."""
        number = int(message["bucket"])
        meeting = self._meetings.setdefault(number, Meeting())
        # A pickle from the process that has proved to be the sender.
        uuid, rebuild = pickle.loads(base64.b64decode(message["block"]))
        if meeting.tensors and meeting.tensors != message["tensors"]:
            raise WeightSyncError(
                f"{self.where}: bucket {number} of sender rank {source.sender.rank} holds other tensors than that "
                "bucket of another rank; all ranks of a trainer must stream the same tensors in the same order"
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
