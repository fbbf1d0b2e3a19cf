"""What one rank holds of each tensor: a run of its elements, with their optimizer state.

Every ZeRO stage cuts flattened tensors, each at other places. Checkpoints and incoming weights see only these
fragments, so that they do not depend on the stage or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from chatlearn_core.types import Box
from chatlearn_trainer_kit.weight_loader import blend


@dataclass(slots=True, frozen=True)
class Fragment:
    """Elements [start, start + n) of one flattened tensor of the model."""

    name: str
    """Name in the model's state."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    values: Tensor
    """[n], a view: the master weights of a trained parameter, otherwise the weights themselves."""
    moments: Mapping[str, Tensor] = field(default_factory=dict)
    """[n] each, views of the optimizer's state; empty before the first step."""
    scalars: Mapping[str, Tensor] = field(default_factory=dict)
    """State without dimensions, such as the optimizer's ``step``; shared by all fragments of a partition."""
    copies: tuple[tuple[int, Tensor], ...] = ()
    """(start, [m]) of other memory with this tensor's weights: those that the model computes with."""
    is_first: bool = True
    """Whether no lower rank holds the same elements."""

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


@torch.no_grad()
def write_whole(fragment: Fragment, source: Tensor, decay: float = 0.0) -> None:
    """Write a whole tensor, which every rank has, into everything that this rank holds of it.

    Args:
        fragment: of that tensor.
        source: the whole tensor, of shape ``fragment.shape``.
        decay: see ``blend``.
    """
    flat = source.detach().reshape(-1)
    for start, target in ((fragment.start, fragment.values), *fragment.copies):
        blend(flat[start : start + target.numel()], target, decay)


def boxes_of_run(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return boxes that cover elements [start, stop) of a flattened tensor once, in the elements' order.

    A run of a matrix is at most three boxes: the end of a row, whole rows, and the beginning of one.

    Args:
        shape: of the tensor; it has dimensions.
        start: first element.
        stop: end of the run.
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start, stop),)]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        inner = boxes_of_run(shape[1:], start - first * row, stop - first * row)
        return [((first, first + 1), *box) for box in inner]
    begin, end = -(-start // row), stop // row
    found = [((first, first + 1), *box) for box in boxes_of_run(shape[1:], start - first * row, row) if first < begin]
    if begin < end:
        found.append(((begin, end), *((0, size) for size in shape[1:])))
    if end * row < stop:
        found += [((end, end + 1), *box) for box in boxes_of_run(shape[1:], 0, stop - end * row)]
    return found


def without_adapters(fragments: Mapping[str, Fragment]) -> dict[str, Fragment]:
    """Return the fragments of the model's weights under their names without adapters."""
    return {
        name.replace(".base_layer", ""): fragment
        for name, fragment in fragments.items()
        if ".lora_A." not in name and ".lora_B." not in name
    }
