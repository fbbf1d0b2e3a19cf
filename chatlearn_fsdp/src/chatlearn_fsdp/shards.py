"""The part of each checkpoint tensor that this rank holds; it is read at the start and streamed as boxes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from chatlearn_fsdp.sharding import box_of_rows
from chatlearn_hf.checkpoint_names import StateTensor


@dataclass(slots=True, frozen=True)
class HeldRows:
    """Rows [first, last) of one checkpoint tensor, as a view of this rank's shard."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole checkpoint tensor."""
    first: int
    last: int
    view: Tensor


def held_rows(entry: StateTensor, local: Tensor, start: int) -> Iterator[HeldRows]:
    """Yield the checkpoint rows inside rows [start, start + n) of a state tensor.

    Args:
        entry: the state tensor; its parts must be views and it must have a dimension.
        local: [n, ...] contiguous, the rows that this rank holds.
        start: index of the first of them.
    """
    assert entry.parts is not None, f"{entry.key} has no views of its checkpoint tensors"
    if not local.shape[0]:
        return
    shell = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    row_elements = shell.stride(0)
    for name, part_of, shape in zip(entry.names, entry.parts, entry.shapes, strict=True):
        part = part_of.view(shell).view(shape)
        first, last = box_of_rows(part, (start, start + local.shape[0]), row_elements)
        if first == last:
            continue
        offset = part.storage_offset() + first * part.stride(0) - start * row_elements
        view = local.as_strided((last - first, *shape[1:]), part.stride(), local.storage_offset() + offset)
        yield HeldRows(name, shape, first, last, view)
