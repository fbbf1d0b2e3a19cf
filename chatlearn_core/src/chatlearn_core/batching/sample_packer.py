"""Packs the samples of a step once; further batches of the same samples select from what is packed."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from chatlearn_core.types import Sample, TrainBatch, end_to_end, pack_samples, per_sequence
from chatlearn_core.types.array_ref import Array, TensorRef


@dataclass(slots=True, frozen=True)
class _Place:
    """Where the rows of an array are packed."""

    array: Array
    """Kept, so that no other array gets its ``id``."""
    packed: Tensor
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.array)


class SamplePacker:
    """Packs samples as ``pack_samples`` does, but copies the rows of each array only once.

    The calls of a step, its advantages, its metrics and its updates need batches of (mostly) the same samples, while
    calls add data to these samples. The first batch that needs a field packs it. Later batches of these samples, or
    of some of them, select from the packed tensor: neighbouring sequences as a view, others as a copy. Outputs that
    are already packed (``unpack``) are never packed again. An array that replaced another one is packed anew.

    Arrays become read-only when they are packed, because later batches would not contain a change. Batches share
    tensors: code that changes one in place changes the others.

    Example: after ``pack([a, b, c])``, ``pack([b, c]).token_ids`` is a view of the first batch's ``token_ids``.
    """

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}

    def pack(self, samples: Sequence[Sample], units: Sequence[Hashable] | None = None) -> TrainBatch:
        """The samples as a batch.

        Args:
            samples: in the order the batch is to have.
            units: see ``pack_samples``.

        Raises:
            BackendError: see ``pack_samples``.
        """
        return pack_samples(samples, units, join=self._joined)

    def unpack(self, values: Tensor, batch: TrainBatch, name: str) -> list[Array]:
        """Split per-token data of a batch into one array per sequence, see ``per_sequence``; batches that need these
        arrays select from ``values``.

        Args:
            values: [T, ...]
            name: name of the data in the samples, for messages.
        """
        rows = per_sequence(values, batch.lengths, batch.sample_ids, name)
        if not isinstance(values, TensorRef):
            self._remember(rows, values.to(torch.float32 if values.is_floating_point() else values.dtype).contiguous())
        return rows

    def _joined(self, arrays: Sequence[Array]) -> Tensor:
        places = [self._places.get(id(array)) for array in arrays]
        known = [place for place in places if place is not None]
        if len(known) == len(arrays) and all(place.packed is known[0].packed for place in known):
            rows = [known[0].packed[start:stop] for start, stop in _spans(known)]
            return rows[0] if len(rows) == 1 else torch.cat(rows)
        packed = end_to_end(arrays)
        if not isinstance(packed, TensorRef):
            self._remember(arrays, packed)
        return packed

    def _remember(self, arrays: Sequence[Array], packed: Tensor) -> None:
        start = 0
        for array in arrays:
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
            self._places[id(array)] = _Place(array, packed, start)
            start += len(array)


def _spans(places: Sequence[_Place]) -> Iterator[tuple[int, int]]:
    """The rows of consecutive places; neighbours are joined."""
    start, stop = places[0].start, places[0].stop
    for place in places[1:]:
        if place.start != stop:
            yield start, stop
            start = place.start
        stop = place.stop
    yield start, stop
