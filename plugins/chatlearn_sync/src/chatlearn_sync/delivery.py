"""Passes received data to a loader: unchanged, or with boxes assembled if the loader accepts only whole tensors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.protocols import WeightLoader
from chatlearn_core.types import BoxCover, SyncRequest, WeightShard
from chatlearn_core.types.boxes import slices

ASSEMBLY_SHARE = 2
"""Divisor of ``plan.bucket_bytes`` that gives the memory for tensors being assembled."""
STALL_S = 1.0
"""Time that a sender waits for room before it exceeds the limit, seconds: another receiver may delay the rest."""


class Delivery:
    """Passes one sync's data to a loader. Buckets of several senders may be passed concurrently.

    Args:
        awaited: returns the ranks that may still send.
    """

    def __init__(self, plan: SyncRequest, loader: WeightLoader, awaited: Callable[[], frozenset[int]]) -> None:
        self._loader = loader
        self._takes_boxes = plan.channel == "boxes"
        assembles = plan.export == "boxes" and not self._takes_boxes
        self._assembly = Assembly(plan.bucket_bytes // ASSEMBLY_SHARE, awaited) if assembles else None
        self._loading = asyncio.Lock()

    async def load(self, shards: Iterable[WeightShard], sender_rank: int) -> None:
        """Load one bucket, which is valid until this returns. Buckets of one sender must follow one another."""
        if self._assembly is not None:
            await self._assemble(shards, sender_rank, self._assembly)
            return
        async with self._loading:
            if self._takes_boxes:
                await self._loader.load_boxes(shards)
            else:
                await self._loader.load_tensors((shard.name, shard.tensor) for shard in shards)

    async def sender_ended(self) -> None:
        """A sender has finished: senders that wait for room check again."""
        if self._assembly is not None:
            await self._assembly.look_again()

    async def _assemble(self, shards: Iterable[WeightShard], sender_rank: int, assembly: Assembly) -> None:
        complete: list[tuple[str, Tensor]] = []

        async def flush() -> None:
            if not complete:
                return
            async with self._loading:
                await self._loader.load_tensors(iter(complete))
            names = [name for name, _ in complete]
            complete.clear()
            await assembly.let_go(names)

        for shard in shards:
            if shard.is_whole:
                async with self._loading:
                    await self._loader.load_tensors(iter([(shard.name, shard.tensor)]))
                continue
            if not assembly.has_room(shard):
                await flush()
                await assembly.wait_for_room(shard, sender_rank)
            tensor = assembly.place(shard)
            if tensor is not None:
                complete.append((shard.name, tensor))
                del tensor
        await flush()


@dataclass(slots=True, eq=False)
class _Whole:
    tensor: Tensor
    cover: BoxCover


class Assembly:
    """Tensors being assembled from boxes of several senders.

    Senders stream in one order, so few tensors are incomplete at a time. A sender that is ahead waits for room as long
    as another one can complete a tensor; the limit is exceeded only if none can.

    Args:
        limit_bytes: limit for all held tensors, bytes.
        awaited: returns the ranks that may still send.
    """

    def __init__(self, limit_bytes: int, awaited: Callable[[], frozenset[int]]) -> None:
        self._limit_bytes = limit_bytes
        self._awaited = awaited
        self._tensors: dict[str, _Whole] = {}
        self._waiting: set[int] = set()
        self._changed = asyncio.Condition()
        self.held_bytes = 0
        self.most_bytes = 0
        """Maximum number of bytes held at a time."""

    def has_room(self, shard: WeightShard) -> bool:
        """Whether a shard fits within the limit; a tensor above the limit fits only if no other is held."""
        return shard.name in self._tensors or not self._tensors or self.held_bytes + _size(shard) <= self._limit_bytes

    async def wait_for_room(self, shard: WeightShard, sender_rank: int) -> None:
        """Return when a shard can be placed, or when waiting cannot help."""
        async with self._changed:
            self._waiting.add(sender_rank)
            self._changed.notify_all()  # other senders may wait for this one
            try:
                with contextlib.suppress(TimeoutError):  # then the limit is exceeded for a while
                    async with asyncio.timeout(STALL_S):
                        await self._changed.wait_for(lambda: self.has_room(shard) or self._awaited() <= self._waiting)
            finally:
                self._waiting.discard(sender_rank)

    def place(self, shard: WeightShard) -> Tensor | None:
        """Copy a box to its place; returns the tensor once it is complete.

        Raises:
            WeightSyncError: an element arrived twice.
        """
        whole = self._tensors.get(shard.name)
        if whole is None:
            tensor = torch.empty(shard.global_shape, dtype=shard.tensor.dtype, device=shard.tensor.device)
            whole = self._tensors[shard.name] = _Whole(tensor, BoxCover(shard.global_shape))
            self.held_bytes += tensor.nbytes
            self.most_bytes = max(self.most_bytes, self.held_bytes)
        refusal = whole.cover.add(shard.box)
        if refusal is not None:
            raise WeightSyncError(f"tensor {shard.name!r}: {refusal}")
        whole.tensor[slices(shard.box)] = shard.tensor
        return whole.tensor if whole.cover.is_complete else None

    async def let_go(self, names: Iterable[str]) -> None:
        """Release tensors that have been loaded."""
        async with self._changed:
            for name in names:
                self.held_bytes -= self._tensors.pop(name).tensor.nbytes
            self._changed.notify_all()

    async def look_again(self) -> None:
        """Let waiting senders check again."""
        async with self._changed:
            self._changed.notify_all()


def _size(shard: WeightShard) -> int:
    return int(torch.Size(shard.global_shape).numel()) * shard.tensor.element_size()
