"""Boxes: rectangular parts of a tensor, and a check that a set of them covers the tensor exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

Box = tuple[tuple[int, int], ...]
"""Half-open interval [start, stop) in each dimension of the global tensor; ``()`` for a scalar.

Example: rows 2 and 3 of a [4, 8] matrix are ``((2, 4), (0, 8))``.
"""


def full_box(shape: Iterable[int]) -> Box:
    """The box that covers a tensor of this shape."""
    return tuple((0, size) for size in shape)


def extent(box: Box) -> tuple[int, ...]:
    """The shape of the tensor in a box."""
    return tuple(stop - start for start, stop in box)


def num_elements(box: Box) -> int:
    """Number of elements in a box; 1 for a scalar."""
    return prod(extent(box))


def slices(box: Box) -> tuple[slice, ...]:
    """The index that selects a box from a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def lies_in(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box has this tensor's rank and stays within its shape."""
    return len(box) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
    )


def overlap(one: Box, other: Box) -> Box | None:
    """The elements that two boxes of one tensor share; None if they share none."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def box_text(box: Box) -> str:
    """A box written as an index: ``[2:4, 0:8]``."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


@dataclass(slots=True)
class BoxCover:
    """The boxes of one tensor received so far; they must not overlap."""

    shape: tuple[int, ...]
    boxes: list[Box] = field(default_factory=list)
    _covered: int = 0

    def add(self, box: Box) -> str | None:
        """Record a box. Returns the reason if the box is refused (and not recorded), None if it fits."""
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
        """Whether every element has been received."""
        return self._covered == prod(self.shape)

    def missing(self) -> list[Box]:
        """The elements not yet received, as boxes that do not overlap."""
        left = [full_box(self.shape)] if not self.is_complete else []
        for box in self.boxes:
            left = [rest for whole in left for rest in _without(whole, box)]
        return left


def _without(whole: Box, hole: Box) -> list[Box]:
    """``whole`` without the elements of ``hole``, as boxes that do not overlap."""
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
