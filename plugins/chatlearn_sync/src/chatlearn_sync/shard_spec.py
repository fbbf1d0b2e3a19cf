"""Description of one transmitted tensor or box, as the two ends exchange it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chatlearn_core.types import TensorSpec, WeightShard
from chatlearn_core.types.boxes import Box, extent, full_box, num_elements


@dataclass(slots=True, frozen=True)
class ShardSpec:
    """A tensor or a box of one, without its values."""

    name: str
    dtype: str
    """torch's name without the prefix."""
    global_shape: tuple[int, ...]
    box: Box

    @classmethod
    def of(cls, shard: WeightShard) -> ShardSpec:
        """The description of a shard."""
        return cls(shard.name, dtype_name(shard.tensor), shard.global_shape, shard.box)

    @property
    def is_whole(self) -> bool:
        return self.box == full_box(self.global_shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        return extent(self.box)

    @property
    def num_bytes(self) -> int:
        """Size of the box, bytes."""
        return num_elements(self.box) * int(getattr(torch, self.dtype).itemsize)

    @property
    def spec(self) -> TensorSpec:
        """The box described as a whole tensor."""
        return TensorSpec(self.name, self.shape, self.dtype)

    def shard(self, tensor: Tensor, owner_rank: int) -> WeightShard:
        """The shard with these values."""
        return WeightShard(self.name, self.global_shape, self.box, owner_rank, tensor)

    def to_json(self) -> list[Any]:
        """Return ``[name, dtype, shape]`` for a whole tensor; a box adds the tensor's shape and the box's start."""
        described = [self.name, self.dtype, list(self.shape)]
        return described if self.is_whole else [*described, list(self.global_shape), [start for start, _ in self.box]]

    @classmethod
    def from_json(cls, described: list[Any]) -> ShardSpec:
        """Build a description from the output of ``to_json``."""
        name, dtype, shape, *place = described
        if not place:
            return cls(name, dtype, tuple(shape), full_box(shape))
        global_shape, starts = place
        box = tuple((start, start + size) for start, size in zip(starts, shape, strict=True))
        return cls(name, dtype, tuple(global_shape), box)


def dtype_name(tensor: Tensor) -> str:
    """Return torch's name of a dtype without the prefix, such as ``bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")


def whole_shard(name: str, tensor: Tensor, owner_rank: int = 0) -> WeightShard:
    """Wrap a whole tensor as a shard."""
    shape = tuple(tensor.shape)
    return WeightShard(name, shape, full_box(shape), owner_rank, tensor)
