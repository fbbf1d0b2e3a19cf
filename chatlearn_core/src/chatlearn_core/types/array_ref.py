"""References to arrays that workers keep: shape, dtype and location, without the values.

A runtime with several processes uses references in place of arrays, because the executor and algorithms mostly need
lengths. References can be sliced and concatenated by rows without fetching values. Code that needs values gets them by
sample and field from the runtime's ``DataStore``; any other use raises ``UnfetchedError``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NoReturn, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.mixins import NDArrayOperatorsMixin
from torch import Tensor

from chatlearn_core.exceptions import UnfetchedError
from chatlearn_core.types.pickling import pickled_by_position

Array = npt.NDArray[Any]


class Block(Protocol):
    """Named arrays that were stored together. A ``DataStore`` fetches them into a process."""

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Rows [start, stop) of one array, read-only. The block must already be in this process."""


@pickled_by_position
@dataclass(slots=True, frozen=True, eq=False)
class Rows:
    """Rows [start, stop) of array ``name`` of a block."""

    block: Block
    name: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> Rows:
        """Some of these rows."""
        return Rows(self.block, self.name, self.start + start, self.start + stop)

    def values(self) -> Array:
        """The values, read-only. The block must already be in this process."""
        return self.block.rows(self.name, self.start, self.stop)


@pickled_by_position
@dataclass(slots=True, frozen=True)
class Fill:
    """``count`` equal rows."""

    value: float
    count: int

    def __len__(self) -> int:
        return self.count

    def cut(self, start: int, stop: int) -> Fill:
        """Some of these rows."""
        return Fill(self.value, stop - start)


Piece = Array | Rows | Fill


@lru_cache(maxsize=4096, typed=True)
def fill(value: float, count: int) -> Fill:
    """``Fill(value, count)``, the same object for the same arguments, which a message then carries once."""
    return Fill(value, count)


class _Unfetched(NDArrayOperatorsMixin):
    """Raises ``UnfetchedError`` when values are needed."""

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UnfetchedError(self._message())

    def _message(self) -> str:
        raise NotImplementedError

    __array__ = __array_ufunc__ = __array_function__ = _refuse
    __getitem__ = __iter__ = __contains__ = __bool__ = __int__ = __float__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnfetchedError(f"{self._message()} (.{name} was used)")


class ArrayRef(_Unfetched):
    """[N, ...] a reference to an array made of consecutive pieces, each either in this process or stored elsewhere.

    Args:
        pieces: parts of the array, in order.
        tail: shape of one row.
        dtype: dtype of the values.
        owner: id of the sample or completion that the array belongs to, for messages.
        key: name of the array in its owner, for messages.
    """

    __slots__ = ("dtype", "key", "owner", "pieces", "shape")

    def __init__(
        self, pieces: Iterable[Piece], tail: tuple[int, ...], dtype: npt.DTypeLike, owner: str = "", key: str = ""
    ) -> None:
        self.pieces: tuple[Piece, ...] = tuple(pieces)
        self.shape: tuple[int, ...] = (sum(map(len, self.pieces)), *tail)
        self.dtype = np.dtype(dtype)
        self.owner = owner
        self.key = key

    def _message(self) -> str:
        return unfetched(self.owner, self.key)

    def named(self, owner: str, key: str) -> ArrayRef:
        """The same array, labelled as ``key`` of ``owner`` for messages."""
        return _array_ref(self.pieces, self.shape, self.dtype, owner, key)

    def cut(self, start: int, stop: int) -> ArrayRef:
        """Rows [start, stop), by reference."""
        start, stop, _ = slice(start, stop).indices(len(self))
        stop = max(start, stop)
        pieces = tuple(self._cut(start, stop))
        return _array_ref(pieces, (stop - start, *self.shape[1:]), self.dtype, self.owner, self.key)

    def behind(self, piece: Piece) -> ArrayRef:
        """A reference to ``piece`` followed by this array."""
        shape = (len(piece) + self.shape[0], *self.shape[1:])
        return _array_ref((piece, *self.pieces), shape, self.dtype, self.owner, self.key)

    def read_only(self) -> ArrayRef:
        """The same array with the pieces in this process made read-only. Stored pieces are always read-only."""
        pieces: list[Piece] = []
        for piece in self.pieces:
            if isinstance(piece, np.ndarray):
                piece = piece.view()
                piece.flags.writeable = False
            pieces.append(piece)
        return ArrayRef(pieces, self.shape[1:], self.dtype, self.owner, self.key)

    @property
    def blocks(self) -> list[Block]:
        """The blocks that hold this array's stored pieces."""
        return [piece.block for piece in self.pieces if isinstance(piece, Rows)]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def _cut(self, start: int, stop: int) -> Iterator[Piece]:
        at = 0
        for piece in self.pieces:
            first, last = max(start - at, 0), min(stop - at, len(piece))
            if first < last:
                yield piece[first:last] if isinstance(piece, np.ndarray) else piece.cut(first, last)
            at += len(piece)

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrayRef, (self.pieces, self.shape[1:], self.dtype, self.owner, self.key)

    def __repr__(self) -> str:
        return f"ArrayRef(shape={self.shape}, dtype={self.dtype}, owner={self.owner!r}, key={self.key!r})"


def _array_ref(pieces: tuple[Piece, ...], shape: tuple[int, ...], dtype: Any, owner: str, key: str) -> ArrayRef:
    """A reference of known shape, without counting its rows: a step makes several for every sample."""
    made = ArrayRef.__new__(ArrayRef)
    made.pieces, made.shape, made.dtype, made.owner, made.key = pieces, shape, dtype, owner, key
    return made


def unfetched(owner: str, key: str) -> str:
    """Message of an ``UnfetchedError`` for one array."""
    whose = f"{key or 'an array'!r} of {owner!r}" if owner else repr(key or "an array")
    return (
        f"the values of {whose} are with the worker that made them; in the driver only shape and dtype are known. Get "
        f"them first: DataStore.get(samples, fields={{{key!r}}}), or name the field in `reads` of the filter, sampler "
        "or loss that needs it"
    )


def values_of(array: Array | ArrayRef) -> Array:
    """[N, ...] the values: a view if the array is one piece, a copy if it joins several. All blocks of a reference must
    already be in this process.
    """
    if not isinstance(array, ArrayRef):
        return array
    parts = [_values_of_piece(piece, array) for piece in array.pieces]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(array.shape, array.dtype)


def _values_of_piece(piece: Piece, array: ArrayRef) -> Array:
    if isinstance(piece, Fill):
        return np.full((piece.count, *array.shape[1:]), piece.value, array.dtype)
    return piece.values() if isinstance(piece, Rows) else piece


def cut(array: Array, start: int, stop: int) -> Array:
    """Rows [start, stop) of an array; a reference yields a reference."""
    return cast(Array, array.cut(start, stop)) if isinstance(array, ArrayRef) else array[start:stop]


def named(array: Array, owner: str, key: str) -> Array:
    """The array itself; a reference is labelled as ``key`` of ``owner`` for messages."""
    return cast(Array, array.named(owner, key)) if isinstance(array, ArrayRef) else array


def joined(parts: Sequence[Array], dtype: npt.DTypeLike | None = None) -> Array:
    """Concatenate arrays along rows, like ``np.concatenate``; the result is a reference if any part is one.

    Args:
        parts: at least one.
        dtype: dtype of the result; by default that of the parts. Stored parts must already have it.
    """
    if not any(isinstance(part, ArrayRef) for part in parts):
        return np.concatenate(parts) if dtype is None else np.concatenate(parts).astype(dtype)
    dtype = np.dtype(parts[-1].dtype if dtype is None else dtype)
    pieces: list[Piece] = []
    for part in parts:
        if isinstance(part, ArrayRef):
            pieces.extend(part.pieces)
        else:
            pieces.append(part.astype(dtype, copy=False))
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    # Samples and batches declare plain arrays: that is what all code but the executor's routing sees.
    return cast(Array, _array_ref(tuple(pieces), shape, dtype, "", ""))


class TensorRef(_Unfetched):
    """[N, ...] a reference to a packed tensor: the rows of consecutive sequences.

    Args:
        sequences: one array per sequence, at least one; some or all of them ``ArrayRef``.
    """

    __slots__ = ("dtype", "sequences", "shape")

    def __init__(self, sequences: Sequence[Array]) -> None:
        self.sequences = list(sequences)
        self.shape = (sum(map(len, self.sequences)), *self.sequences[0].shape[1:])
        self.dtype = torch.from_numpy(np.empty(0, self.sequences[0].dtype)).dtype

    def _message(self) -> str:
        sequences: list[Any] = self.sequences
        first = next(array for array in sequences if isinstance(array, ArrayRef))
        return unfetched(first.owner, first.key)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        used = next((one for one in args if isinstance(one, TensorRef)), None)
        raise UnfetchedError(unfetched("", getattr(func, "__name__", "")) if used is None else used._message())

    def select_sequences(self, indices: Sequence[int]) -> Tensor:
        """The rows of the sequences at ``indices``, in that order, by reference."""
        chosen = [self.sequences[i] for i in indices]
        return cast(Tensor, TensorRef(chosen)) if chosen else torch.empty((0, *self.shape[1:]), dtype=self.dtype)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def device(self) -> torch.device:
        """Always the host: batches in the driver are on the host."""
        return torch.device("cpu")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return sum(map(len, self.sequences))

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorRef, (self.sequences,)

    def __repr__(self) -> str:
        return f"TensorRef(shape={self.shape}, dtype={self.dtype})"


def per_sequence(values: Tensor, lengths: Sequence[int], owners: Sequence[str], key: str) -> list[Array]:
    """Split [T, ...] values of packed sequences into one array per sequence; floating-point values become float32. A
    ``TensorRef`` yields references.

    Args:
        values: values of all sequences.
        lengths: length of each sequence, tokens.
        owners: ids of the samples, for messages.
        key: name of the values in those samples, for messages.
    """
    if isinstance(values, TensorRef):
        wanted = np.dtype(np.float32) if values.is_floating_point() else values.sequences[0].dtype
        assert values.sequences[0].dtype == wanted, "workers store floating-point values in float32"
        return [named(array, owner, key) for array, owner in zip(values.sequences, owners, strict=True)]
    array = values.to(torch.float32 if values.is_floating_point() else values.dtype).numpy()
    return [array[start:stop] for start, stop in pairwise([0, *accumulate(lengths)])]


@pickled_by_position
@dataclass(slots=True, frozen=True, eq=False)
class TextRef:
    """A reference to a text stored as UTF-8 bytes in a block. Replaces ``text`` of a completion or turn."""

    rows: Rows
    owner: str = ""
    """Id of the sample or completion, for messages."""

    def values(self) -> str:
        """The text. The block must already be in this process."""
        return self.rows.values().tobytes().decode("utf-8", errors="surrogatepass")

    def __str__(self) -> str:
        raise UnfetchedError(unfetched(self.owner, "text"))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnfetchedError(f"{unfetched(self.owner, 'text')} (.{name} was used)")

    def __len__(self) -> int:
        raise UnfetchedError(unfetched(self.owner, "text"))
