"""Tensors as NumPy arrays for transport between processes.

Ray returns NumPy arrays from its object store as views, without a copy; it would copy torch tensors for every reader.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatlearn_core.types import TrainBatch
from chatlearn_core.types.array_ref import Array, ArrayRef, Fill, Piece, Rows, TensorRef
from chatlearn_workers.blocks import StoredBlock, fetch_blocks
from chatlearn_workers.runs import RunArray

_CARRIERS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
"""Tensors of dtypes that NumPy lacks are sent as integers of the same width."""


@dataclass(slots=True, frozen=True)
class TensorArray:
    """A tensor's values as an array, and its dtype if NumPy lacks it."""

    array: npt.NDArray[Any] | RunArray
    dtype: str | None = None

    @staticmethod
    def of(tensor: Tensor, *, short: bool = False) -> TensorArray:
        """Convert a tensor on any device; one on the host is not copied.

        Args:
            short: encode runs of equal values by their lengths if that is smaller.
        """
        host = tensor.detach().cpu()
        carrier = _CARRIERS.get(host.dtype)
        array = host.numpy() if carrier is None else host.view(carrier).numpy()
        dtype = None if carrier is None else str(host.dtype).removeprefix("torch.")
        return TensorArray((RunArray.of(array) if short else None) or array, dtype)

    def tensor(self) -> Tensor:
        """The tensor, a view if the values are an array. It may be read-only: receivers must not write into a batch."""
        array = self.array.array() if isinstance(self.array, RunArray) else self.array
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            view = torch.from_numpy(array if array.ndim else np.array(array))
        return view if self.dtype is None else view.view(getattr(torch, self.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return self.array.nbytes

    @property
    def blocks(self) -> tuple[StoredBlock, ...]:
        """The blocks that it refers to: none."""
        return ()


@dataclass(slots=True, frozen=True)
class RowsArray:
    """A tensor by reference: the rows and blocks that make it up, and rows that are held directly."""

    blocks: tuple[StoredBlock, ...]
    names: tuple[str, ...]
    index: npt.NDArray[np.int64]
    """[P, 4], one row per piece: block, name, start and stop; or -1, 0 and start and stop of rows held directly; or -2,
    the index of the row to repeat, 0, and the number of repetitions."""
    at_hand: Array
    """[H, ...] the rows held directly."""
    repeated: Array
    """[R, ...] rows to repeat."""
    tail: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(tensor: TensorRef) -> RowsArray:
        """Nothing is fetched."""
        blocks: dict[int, tuple[int, Any]] = {}
        names: dict[str, int] = {}
        index: list[tuple[int, int, int, int]] = []
        at_hand: list[Array] = []
        repeated: dict[str, tuple[int, float]] = {}  # by spelling, which tells -0.0 from 0.0
        rows = 0
        for piece in _pieces(tensor.sequences):
            if isinstance(piece, Fill):
                row, _ = repeated.setdefault(str(piece.value), (len(repeated), piece.value))
                index.append((-2, row, 0, piece.count))
            elif isinstance(piece, Rows):
                block = blocks.setdefault(id(piece.block), (len(blocks), piece.block))[0]
                index.append((block, names.setdefault(piece.name, len(names)), piece.start, piece.stop))
            else:
                index.append((-1, 0, rows, rows + len(piece)))
                at_hand.append(piece)
                rows += len(piece)
        tail, dtype = tuple(tensor.shape[1:]), tensor.sequences[0].dtype
        return RowsArray(
            tuple(block for _, block in blocks.values()),
            tuple(names),
            np.array(index, np.int64).reshape(-1, 4),
            np.concatenate(at_hand) if at_hand else np.zeros((0, *tail), dtype),
            _filled([value for _, value in repeated.values()], tail, dtype),
            tail,
            dtype.str,
        )

    def tensor(self) -> Tensor:
        """The tensor, copied once from the store's memory."""
        parts = [self._rows(*place) for place in self.index.tolist()]
        return torch.from_numpy(np.concatenate(parts) if parts else np.zeros((0, *self.tail), self.dtype))

    def _rows(self, block: int, name: int, start: int, stop: int) -> Array:
        if block == -2:
            return np.broadcast_to(self.repeated[name], (stop, *self.tail))
        return self.at_hand[start:stop] if block < 0 else self.blocks[block].rows(self.names[name], start, stop)

    @property
    def nbytes(self) -> int:
        """Bytes to send; blocks are already in the store."""
        return self.at_hand.nbytes + self.repeated.nbytes + self.index.nbytes


def _filled(values: Sequence[float], tail: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """[R, ...] one row for each value, filled with it."""
    rows = np.empty((len(values), *tail), dtype)
    for row, value in enumerate(values):
        rows[row] = value
    return rows


def _pieces(arrays: Iterable[Array]) -> Iterable[Piece]:
    for array in arrays:
        if isinstance(array, ArrayRef):
            yield from array.pieces
        else:
            yield array


Carried = TensorArray | RowsArray


@dataclass(slots=True, frozen=True)
class BatchArrays:
    """A ``TrainBatch`` as arrays."""

    sample_ids: tuple[str, ...]
    example_ids: tuple[str, ...]
    fields: Mapping[str, Carried]
    token_data: Mapping[str, Carried]
    sequence_data: Mapping[str, Carried]

    @staticmethod
    def of(batch: TrainBatch) -> BatchArrays:
        """Convert a batch on the host; references are not fetched."""
        return BatchArrays(
            batch.sample_ids,
            batch.example_ids,
            {name: _carried(getattr(batch, name)) for name in _FIELDS},
            {name: _carried(tensor) for name, tensor in batch.token_data.items()},
            {name: _carried(tensor) for name, tensor in batch.sequence_data.items()},
        )

    def batch(self) -> TrainBatch:
        """The batch; its tensors are views of the arrays if these are not run-encoded. Blocks the thread until
        referenced rows have arrived.

        Raises:
            TrainerLostError: the node that held some rows is gone.
        """
        fetch_blocks(block for array in self._all() for block in array.blocks)
        return TrainBatch(
            sample_ids=self.sample_ids,
            example_ids=self.example_ids,
            **{name: array.tensor() for name, array in self.fields.items()},
            token_data=to_tensors(self.token_data),
            sequence_data=to_tensors(self.sequence_data),
        )

    def _all(self) -> list[Carried]:
        return [array for part in (self.fields, self.token_data, self.sequence_data) for array in part.values()]

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays that are sent with the batch."""
        return sum(array.nbytes for array in self._all())


_FIELDS = ("token_ids", "cu_seqlens", "loss_mask", "unit_index", "group_index", "num_prompt_tokens")


def _carried(tensor: Tensor) -> Carried:
    return RowsArray.of(tensor) if isinstance(tensor, TensorRef) else TensorArray.of(tensor, short=True)


def to_arrays(tensors: Mapping[str, Tensor]) -> dict[str, TensorArray]:
    """Every tensor of a mapping as an array."""
    return {name: TensorArray.of(tensor) for name, tensor in tensors.items()}


def to_tensors(arrays: Mapping[str, Carried]) -> dict[str, Tensor]:
    """The other way."""
    return {name: array.tensor() for name, array in arrays.items()}
