"""The part of each checkpoint tensor that this rank holds; it is read at the start and streamed as boxes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from chatlearn_core.types.boxes import Box, full_box
from chatlearn_fsdp.sharding import box_of_rows
from chatlearn_hf.checkpoint_names import StateTensor


@dataclass(slots=True, frozen=True)
class HeldBox:
    """A box of one checkpoint tensor, as a view of this rank's shard."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole checkpoint tensor."""
    box: Box
    view: Tensor


def held_boxes(entry: StateTensor, local: Tensor, box: Box) -> Iterator[HeldBox]:
    """Yield the checkpoint tensors' boxes inside a box of a state tensor: whole rows, or any box of a tensor that is
    not fused from several.

    Args:
        entry: the state tensor; its parts must be views and it must have a dimension.
        local: contiguous, what this rank holds.
        box: where it lies in the state tensor.
    """
    assert entry.parts is not None, f"{entry.key} has no views of its checkpoint tensors"
    if not local.numel():
        return
    if box[1:] != full_box(entry.shape[1:]):
        assert entry.shapes == (entry.shape,), f"{entry.key} is fused, and split along another dimension than its rows"
        yield HeldBox(entry.names[0], entry.shape, box, local)
        return
    start, stop = box[0]
    shell = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    row_elements = shell.stride(0)
    for name, part_of, shape in zip(entry.names, entry.parts, entry.shapes, strict=True):
        part = part_of.view(shell).view(shape)
        first, last = box_of_rows(part, (start, stop), row_elements)
        if first == last:
            continue
        offset = part.storage_offset() + first * part.stride(0) - start * row_elements
        view = local.as_strided((last - first, *shape[1:]), part.stride(), local.storage_offset() + offset)
        yield HeldBox(name, shape, ((first, last), *full_box(shape[1:])), view)
