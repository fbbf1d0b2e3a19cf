"""Where checkpoint tensors lie inside Megatron-Core's parameters.

A ``Place`` says how one parameter is put together from checkpoint tensors. From it follow the ``Piece``s that a rank
holds: parts of checkpoint tensors as writable views of the parameter. Loading, streaming, export and checkpoints of
other trainers' weights all go through pieces, so a parameter that is described once is right in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from chatlearn_core.types import Box
from chatlearn_hf.lora import Adapter
from chatlearn_megatron.parallel import Shard

Kind = Literal["whole", "rows", "columns", "gated", "qkv"]


@dataclass(slots=True, frozen=True)
class Part:
    """A checkpoint tensor, or some of its rows."""

    name: str
    first: int = 0
    """First row that belongs to the parameter; above 0 if one checkpoint tensor holds query, key and value."""


@dataclass(slots=True, frozen=True)
class Place:
    """How a parameter is put together.

    - ``whole``: one tensor, on every tensor parallel rank.
    - ``rows``, ``columns``: one tensor, split along its first or second dimension.
    - ``gated``: gate and up projection, each split by rows, a rank's parts stacked.
    - ``qkv``: query, key and value projection, split by key-value groups: each group's query heads, key and value head
      follow each other.
    """

    kind: Kind
    parts: tuple[Part, ...]
    transposed: bool = False
    """Whether the checkpoint holds the transposed matrix (GPT-2)."""
    expert: bool = False


@dataclass(slots=True, frozen=True)
class Heads:
    """Sizes of the attention heads of the whole model."""

    query: int
    key: int
    size: int


@dataclass(slots=True, frozen=True)
class Rows:
    """How the rows of a parameter follow each other: in groups, of which each has some rows of every part."""

    groups: int
    widths: tuple[int, ...]
    """Rows of each part in a group."""


@dataclass(slots=True, frozen=True)
class Piece:
    """A part of a checkpoint tensor that this rank holds."""

    name: str
    box: Box
    view: Tensor
    """Writable view of the parameter. Its elements are those of the box in order, but its shape may have more
    dimensions."""
    adapter: Adapter | None = None
    """Of the same rows and columns."""

    def tensor(self) -> Tensor:
        """Return the part in the box's shape; a view where the parameter has such a view, otherwise a copy."""
        return self.view.detach().reshape(self.extent)

    def merged(self) -> Tensor:
        """Return the part in the box's shape with its adapter merged in; without one, see ``tensor``."""
        weight, adapter = self.tensor(), self.adapter
        return weight if adapter is None else adapter.merge(weight, adapter.down, adapter.up)

    def copy_(self, source: Tensor, decay: float = 0.0) -> None:
        """Set ``part = decay * part + (1 - decay) * source``; ``source`` has the box's shape."""
        view, source = self.view.detach(), source.reshape(self.view.shape)
        if decay == 0.0:
            view.copy_(source)
        else:
            view.mul_(decay).add_(source.to(view.device, view.dtype), alpha=1 - decay)

    @property
    def extent(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(last - first for first, last in self.box)


def rows_of(place: Place, held: int, shard: Shard, heads: Heads) -> Rows:
    """Return how the ``held`` rows of a rank's parameter follow each other."""
    if place.kind == "qkv":
        per_group = heads.query // heads.key
        return Rows(heads.key // shard.size, (per_group * heads.size, heads.size, heads.size))
    return Rows(1, (held // len(place.parts),) * len(place.parts))


def pieces_of(
    place: Place, parameter: Tensor, shapes: Sequence[tuple[int, ...]], shard: Shard, heads: Heads
) -> list[Piece]:
    """Return the pieces of one parameter.

    Args:
        place: how the parameter is put together.
        parameter: this rank's part.
        shapes: shape of the checkpoint tensor of each part.
        shard: which part of the parameter the rank holds.
        heads: of the whole model.
    """
    if place.kind == "whole":
        return [_piece(place, 0, 0, parameter, shapes[0])]
    if place.kind == "rows":
        held = parameter.shape[0]
        first = shard.rank * held
        rows = shapes[0][1 if place.transposed else 0]
        # The vocabulary is padded to a multiple of the ranks; the padding is no part of a checkpoint.
        return [_piece(place, 0, first, parameter[: max(0, min(held, rows - first))], shapes[0])]
    if place.kind == "columns":
        held = parameter.shape[1]
        first = shard.rank * held
        box = ((0, parameter.shape[0]), (first, first + held))
        view = parameter
        if place.transposed:
            box, view = (box[1], box[0]), parameter.t()
        return [Piece(place.parts[0].name, box, view)]
    if place.kind == "gated":
        held = parameter.shape[0] // 2
        return [
            _piece(place, number, shard.rank * held, parameter[number * held : (number + 1) * held], shapes[number])
            for number in range(2)
        ]
    fused = rows_of(place, parameter.shape[0], shard, heads)
    parts = torch.split(parameter.view(fused.groups, -1, *parameter.shape[1:]), list(fused.widths), 1)
    counts = [fused.groups * width for width in fused.widths]
    return [
        _piece(place, number, shard.rank * count, part, shapes[number], count)
        for number, (part, count) in enumerate(zip(parts, counts, strict=True))
    ]


def _piece(
    place: Place, number: int, first: int, view: Tensor, shape: tuple[int, ...], rows: int | None = None
) -> Piece:
    """Return the piece of part ``number`` that starts at its row ``first``; ``rows`` of them, if the view has other
    dimensions.
    """
    part = place.parts[number]
    first, rows = part.first + first, rows if rows is not None else view.shape[0]
    if not place.transposed:
        return Piece(part.name, ((first, first + rows), *((0, size) for size in shape[1:])), view)
    # [groups, rows, inputs] or [rows, inputs] in the parameter; [inputs, rows] in the checkpoint.
    return Piece(part.name, ((0, shape[0]), (first, first + rows)), view.movedim(-1, 0))
