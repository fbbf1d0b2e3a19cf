"""Boxes: parts of a tensor, and whether several of them cover it exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

Box = tuple[tuple[int, int], ...]
"""Half-open interval [start, stop) in each dimension of the global tensor; ``()`` of a scalar.

Example: rows 2 and 3 of a [4, 8] matrix are ``((2, 4), (0, 8))``.
"""


def full_box(shape: Iterable[int]) -> Box:
    """The box that covers a tensor of this shape."""
    return tuple((0, size) for size in shape)


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a box's tensor."""
    return tuple(stop - start for start, stop in box)


def num_elements(box: Box) -> int:
    """How many elements a box has; 1 of a scalar."""
    return prod(extent(box))


def slices(box: Box) -> tuple[slice, ...]:
    """The index that selects a box of a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def lies_in(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box is one of a tensor of this shape."""
    return len(box) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
    )


def overlap(one: Box, other: Box) -> Box | None:
    """The elements that two boxes of one tensor share; None if they share none."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def box_text(box: Box) -> str:
    """A box as an index is written: ``[2:4, 0:8]``."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


@dataclass(slots=True)
class BoxCover:
    """The boxes of one tensor that have come so far; none may overlap another."""

    shape: tuple[int, ...]
    boxes: list[Box] = field(default_factory=list)
    _covered: int = 0

    def add(self, box: Box) -> str | None:
        """Take note of a box; returns why it is refused, None if it fits. A refused box is not noted."""
        if not lies_in(box, self.shape):
            return f"box {box_text(box)} does not lie in shape {list(self.shape)}"
        twice = next((shared for other in self.boxes if (shared := overlap(box, other)) is not None), None)
        if twice is not None:
            return f"elements {box_text(twice)} came twice"
        self.boxes.append(box)
        self._covered += num_elements(box)
        return None

    @property
    def is_complete(self) -> bool:
        """Whether every element has come."""
        return self._covered == prod(self.shape)

    def missing(self) -> list[Box]:
        """The elements that have not come, as boxes that do not overlap."""
        left = [full_box(self.shape)] if not self.is_complete else []
        for box in self.boxes:
            left = [rest for whole in left for rest in _without(whole, box)]
        return left


def _without(whole: Box, hole: Box) -> list[Box]:
    """A box without the elements of another one, as boxes that do not overlap."""
    shared = overlap(whole, hole)
    if shared is None:
        return [whole]
    rest: list[Box] = []
    before = list(whole)
    for dimension, ((start, stop), (first, last)) in enumerate(zip(whole, shared, strict=True)):
        for part in ((start, first), (last, stop)):
            if part[0] < part[1]:
                rest.append((*before[:dimension], part, *before[dimension + 1 :]))
        before[dimension] = (first, last)
    return rest
