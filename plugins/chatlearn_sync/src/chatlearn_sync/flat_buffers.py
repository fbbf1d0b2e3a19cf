"""Flat buffers that alternate: while one is sent or loaded, the other is filled."""

from __future__ import annotations

import torch
from torch import Tensor

from chatlearn_core.types import SyncRequest, TensorSpec, WeightShard
from chatlearn_sync.checksum import copy_with_checksum
from chatlearn_sync.shard_spec import dtype_name

IN_FLIGHT = 4
"""Two flat buffers, the tensors being gathered for the next, and the tensor that the stream has just yielded."""


def flat_limit(plan: SyncRequest, least_bytes: int) -> int:
    """Size of one flat buffer, bytes: as large as the largest tensor and at least ``least_bytes``, so that the buffers
    overlap, but within the share of ``plan.bucket_bytes``.
    """
    largest = max((spec.num_bytes for spec in plan.manifest.tensors.values()), default=0)
    return max(1, min(max(largest, least_bytes), plan.bucket_bytes // IN_FLIGHT))


class FlatBuffers:
    """Two buffers, and one for tensors that are larger. Memory is kept: touching new pages costs more than copying."""

    def __init__(self, limit: int, device: str) -> None:
        self._limit = limit
        self._device = device
        self._buffers: dict[int, Tensor] = {}

    def fits(self, limit: int, device: str) -> bool:
        """Whether these buffers suit another sync."""
        return (limit, device) == (self._limit, self._device)

    @property
    def held_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers.values())

    def slot(self, number: int, num_bytes: int) -> int:
        """Return the buffer that bucket ``number`` uses; both ends compute the same one."""
        return 2 if num_bytes > self._limit else number % 2

    def as_it_lies(self, bucket: list[WeightShard]) -> Tensor | None:
        """[num_bytes] uint8, the memory of a bucket of one tensor that can be sent from it; else None."""
        if len(bucket) != 1:
            return None
        tensor = bucket[0].tensor
        if not tensor.is_contiguous() or tensor.device != torch.device(self._device) or tensor.storage_offset() % 8:
            return None
        return tensor.reshape(-1).view(torch.uint8)

    def get(self, slot: int, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 of one buffer."""
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.numel() < num_bytes:
            self._buffers.pop(slot, None)
            buffer = torch.empty(max(self._limit if slot < 2 else 0, num_bytes), dtype=torch.uint8, device=self._device)
            self._buffers[slot] = buffer
        return buffer[:num_bytes]


def wider_first(bucket: list[WeightShard]) -> list[WeightShard]:
    """The order of tensors in a flat buffer without gaps in which each is aligned to its element type."""
    return sorted(bucket, key=lambda shard: -shard.tensor.element_size())


def pack(bucket: list[WeightShard], flat: Tensor, *, with_checksums: bool) -> list[int] | None:
    """Copy tensors, ordered by ``wider_first``, back to back into ``flat``; they may be on any device.

    Returns:
        The tensors' checksums; None without ``with_checksums``.
    """
    offset = 0
    checksums: list[int] = []
    for shard in bucket:
        tensor = shard.tensor
        target = flat[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if with_checksums:
            checksums.append(copy_with_checksum(tensor, target))
        else:
            target.copy_(tensor)
        offset += tensor.nbytes
    return checksums if with_checksums else None


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """A tensor's description."""
    return TensorSpec(name, tuple(tensor.shape), dtype_name(tensor))
