"""Bit-exact differences between two versions of a tensor, stored in the smallest of three forms.

``whole``: all elements. ``indices``: positions of the changed elements and their new values. ``mask``: one bit per
element, and the new values; smaller than ``indices`` once more than one element in 32 changed. Elements are compared
and stored as raw bits: a change from 0.0 to -0.0 counts, and NaN payloads survive.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError

INDICES, MASK, VALUES = "#indices", "#mask", "#values"
"""Suffixes of the names under which parts of a tensor are stored. No tensor name in a checkpoint contains '#'."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element size, bytes -> integer dtype of that size, which compares bit by bit."""
INDEX_BYTES = 4
PIECE = 1 << 19
"""Number of elements compared at a time: a multiple of 8, so that a piece's mask fills whole bytes, and few enough to
stay in the cache.
"""
MOST_INDEXED = 2**31
"""Maximum number of elements of a tensor stored as ``indices``, whose positions are int32; larger ones use a mask."""


def as_bits(tensor: Tensor) -> Tensor:
    """View a contiguous tensor's elements as integers, [num_elements]."""
    return tensor.reshape(-1).view(BITS[tensor.element_size()])


def changes(name: str, old: Tensor, new: Tensor) -> dict[str, Tensor]:
    """Return the parts to store so that ``apply`` turns ``old`` into ``new``; empty if they are equal.

    Args:
        old, new: contiguous host tensors of equal shape and dtype.

    Returns:
        Stored name -> tensor: ``name`` (whole), or ``name#indices`` (int32) and ``name#values``, or ``name#mask``
        (uint8) and ``name#values``. Values are integers of the element's size.
    """
    before, after = as_bits(old), as_bits(new)
    elements, size = after.numel(), new.element_size()
    mask_bytes = -(-elements // 8)
    positions: list[Tensor] = []
    count = 0
    for start, differs in _differences(before, after):
        found = differs.nonzero().reshape(-1)
        if found.numel():
            count += found.numel()
            positions.append((found + start).to(torch.int32))
        if count * INDEX_BYTES > mask_bytes or elements > MOST_INDEXED:
            break
    else:
        if not count:
            return {}
        indices = torch.cat(positions)
        if count * (INDEX_BYTES + size) < new.nbytes:
            return {name + INDICES: indices, name + VALUES: after[indices.to(torch.int64)]}
        return {name: new}
    values: list[Tensor] = []
    packed: list[Tensor] = []
    for start, differs in _differences(before, after):
        values.append(after[start : start + differs.numel()][differs])
        packed.append(torch.from_numpy(np.packbits(differs.numpy())))
    count = sum(part.numel() for part in values)
    if mask_bytes + count * size >= new.nbytes:
        return {name: new}
    return {name + MASK: torch.cat(packed), name + VALUES: torch.cat(values)}


def _differences(before: Tensor, after: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (start, bool mask of differing elements) piece by piece; the next piece overwrites the mask."""
    scratch = torch.empty(min(PIECE, after.numel()), dtype=torch.bool)
    for start in range(0, after.numel(), PIECE):
        stop = min(start + PIECE, after.numel())
        yield start, torch.ne(before[start:stop], after[start:stop], out=scratch[: stop - start])


def apply(name: str, parts: dict[str, Tensor], target: Tensor) -> None:
    """Apply the parts that ``changes`` returned to a contiguous tensor, in place.

    Raises:
        WeightSyncError: the parts do not match the tensor's shape, dtype or number of elements.
    """
    if name in parts:
        if parts[name].shape != target.shape or parts[name].dtype != target.dtype:
            raise WeightSyncError(f"delta of tensor {name!r}: its shape or dtype differs from the previous version's")
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
    """Return the name of the tensor that a stored part belongs to."""
    return stored.partition("#")[0]
