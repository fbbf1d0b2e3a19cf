"""What changed between two versions of a tensor, bit for bit, in the smallest of three forms.

``whole``: all elements. ``indices``: positions and new values. ``mask``: a bit an element, and new values; smaller than
indices once more than one element in 32 changed. Elements are compared and carried as bits, so that -0.0 is a change
and a NaN is not lost.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError

INDICES, MASK, VALUES = "#indices", "#mask", "#values"
"""Endings of the names under which parts of a tensor are stored. No checkpoint name has a '#'."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> a type that is compared bit by bit."""
INDEX_BYTES = 4
MOST_INDEXED = 2**31
"""Elements that a four-byte index tells apart; larger tensors use a mask."""


def as_bits(tensor: Tensor) -> Tensor:
    """A contiguous tensor's elements as integers, in one dimension."""
    return tensor.reshape(-1).view(BITS[tensor.element_size()])


def changes(name: str, old: Tensor, new: Tensor) -> dict[str, Tensor]:
    """The parts to store so that ``apply`` turns ``old`` into ``new``; none if they are equal.

    Args:
        old, new: contiguous host tensors of one shape and dtype.
    """
    before, after = as_bits(old), as_bits(new)
    differs = before != after
    count = int(differs.sum())
    if count == 0:
        return {}
    elements, size = after.numel(), new.element_size()
    by_index = count * (INDEX_BYTES + size) if elements <= MOST_INDEXED else elements * size
    by_mask = -(-elements // 8) + count * size
    if min(by_index, by_mask) >= new.nbytes:
        return {name: new}
    values = after[differs]
    if by_index <= by_mask:
        return {name + INDICES: differs.nonzero().reshape(-1).to(torch.int32), name + VALUES: values}
    return {name + MASK: torch.from_numpy(np.packbits(differs.numpy())), name + VALUES: values}


def apply(name: str, parts: dict[str, Tensor], target: Tensor) -> None:
    """Write what changed into a contiguous tensor, in place.

    Raises:
        WeightSyncError: the parts do not fit the tensor.
    """
    if name in parts:
        if parts[name].shape != target.shape or parts[name].dtype != target.dtype:
            raise WeightSyncError(f"delta of tensor {name!r}: its shape or dtype is not that of the version before")
        target.copy_(parts[name])
        return
    bits, values = as_bits(target), parts[name + VALUES]
    if name + INDICES in parts:
        positions = parts[name + INDICES].to(torch.int64)
    else:
        mask = np.unpackbits(parts[name + MASK].numpy(), count=bits.numel())
        positions = torch.from_numpy(mask).nonzero().reshape(-1)
    if positions.numel() != values.numel() or (positions.numel() and int(positions.max()) >= bits.numel()):
        raise WeightSyncError(f"delta of tensor {name!r}: {values.numel()} values for {positions.numel()} positions")
    bits[positions] = values


def tensor_of(stored: str) -> str:
    """The tensor that a stored part belongs to."""
    return stored.partition("#")[0]
