"""Run-length encoding of arrays with few distinct runs: masks, weights, advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from chatlearn_core.types.pickling import pickled_by_position

_MIN_ROWS = 64
"""Shorter arrays are not encoded."""
_BYTES_OF_A_LENGTH = 4


@pickled_by_position
@dataclass(slots=True, frozen=True, eq=False)
class RunArray:
    """A one-dimensional array, encoded bit-exactly."""

    values: npt.NDArray[Any]
    """[R]"""
    lengths: npt.NDArray[np.int32]
    """[R] number of rows with each value."""

    @staticmethod
    def of(array: npt.NDArray[Any]) -> RunArray | None:
        """The encoded array; None if the array itself takes less than twice as many bytes."""
        if array.ndim != 1 or len(array) < _MIN_ROWS or array.dtype.kind not in "biuf":
            return None
        bits = array.view(f"u{array.itemsize}")  # bitwise: a NaN equals itself, and 0.0 differs from -0.0
        ends = np.flatnonzero(bits[1:] != bits[:-1])
        if 2 * (len(ends) + 1) * (array.itemsize + _BYTES_OF_A_LENGTH) > array.nbytes:
            return None
        bounds = np.concatenate([[0], ends + 1, [len(array)]])
        return RunArray(array[bounds[:-1]], np.diff(bounds).astype(np.int32))

    def array(self) -> npt.NDArray[Any]:
        """The array again."""
        return np.repeat(self.values, self.lengths)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.lengths.nbytes
