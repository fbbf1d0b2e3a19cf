"""Arrays that are kept elsewhere, by reference: what one worker made and another will read.

A runtime over several processes gives such arrays to executor and algorithms, which mostly need shapes. They stand
wherever an array may stand: length, shape and dtype are known, rows are cut without looking at values, and whatever
else is done with them fetches the values first. So any code works on them; only what looks at values makes them travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.mixins import NDArrayOperatorsMixin
from torch import Tensor
from torch.utils._pytree import tree_map_only

from chatlearn_core.types.completion import Completion
from chatlearn_core.types.pickling import pickled_by_position

Array = npt.NDArray[Any]


class Block(Protocol):
    """Named arrays that were stored together."""

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Rows [start, stop) of one array, read-only. Blocks until they are here."""


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

    def fetch(self) -> Array:
        """The values, read-only."""
        return self.block.rows(self.name, self.start, self.stop)


@pickled_by_position
@dataclass(slots=True, frozen=True)
class Fill:
    """Equal rows, told by their value and number."""

    value: float
    count: int

    def __len__(self) -> int:
        return self.count

    def cut(self, start: int, stop: int) -> Fill:
        """Some of these rows."""
        return Fill(self.value, stop - start)


Piece = Array | Rows | Fill


class RemoteArray(NDArrayOperatorsMixin):
    """[N, ...] a numpy array by reference: pieces one after the other, some at hand, some stored.

    Read-only. Nothing is kept of what was fetched: who looks often converts once, with ``np.asarray``.
    """

    __slots__ = ("dtype", "pieces", "shape")

    def __init__(self, pieces: Iterable[Piece], tail: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.pieces = tuple(pieces)
        self.shape = (sum(map(len, self.pieces)), *tail)
        self.dtype = np.dtype(dtype)

    def values(self) -> Array:
        """The array itself: a view where it is one stored piece, a copy where several are joined."""
        parts = [self._values_of(piece) for piece in self.pieces]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(self.shape, self.dtype)

    def _values_of(self, piece: Piece) -> Array:
        if isinstance(piece, Fill):
            return np.full((piece.count, *self.shape[1:]), piece.value, self.dtype)
        return piece.fetch() if isinstance(piece, Rows) else piece

    def behind(self, piece: Piece) -> RemoteArray:
        """The array with a piece in front of it."""
        return RemoteArray((piece, *self.pieces), self.shape[1:], self.dtype)

    def read_only(self) -> RemoteArray:
        """The same array; its pieces at hand cannot be written to. Stored ones never can."""
        pieces: list[Piece] = []
        for piece in self.pieces:
            if isinstance(piece, np.ndarray):
                piece = piece.view()
                piece.flags.writeable = False
            pieces.append(piece)
        return RemoteArray(pieces, self.shape[1:], self.dtype)

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

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) and key.step in (None, 1):
            start, stop, _ = key.indices(len(self))
            return RemoteArray(self._cut(start, max(start, stop)), self.shape[1:], self.dtype)
        return self.values()[key]

    def _cut(self, start: int, stop: int) -> Iterator[Piece]:
        at = 0
        for piece in self.pieces:
            first, last = max(start - at, 0), min(stop - at, len(piece))
            if first < last:
                yield piece[first:last] if isinstance(piece, np.ndarray) else piece.cut(first, last)
            at += len(piece)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __array__(self, dtype: npt.DTypeLike = None, copy: bool | None = None) -> Array:
        values = self.values()
        converted = values if dtype is None else values.astype(dtype, copy=False)
        return converted.copy() if copy else converted

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return getattr(ufunc, method)(*(_at_hand(x) for x in inputs), **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.values(), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteArray, (self.pieces, self.shape[1:], self.dtype)

    def __repr__(self) -> str:
        return f"RemoteArray(shape={self.shape}, dtype={self.dtype})"


def _at_hand(value: Any) -> Any:
    return value.values() if isinstance(value, RemoteArray) else value


def joined(parts: Sequence[Array], dtype: npt.DTypeLike | None = None) -> Array:
    """Arrays one after the other, like ``np.concatenate``; by reference if one of them is.

    Args:
        parts: at least one.
        dtype: of the result; by default that of the parts. A stored part has it already.
    """
    if not any(isinstance(part, RemoteArray) for part in parts):
        return np.concatenate(parts) if dtype is None else np.concatenate(parts).astype(dtype)
    dtype = np.dtype(parts[-1].dtype if dtype is None else dtype)
    pieces: list[Piece] = []
    for part in parts:
        if isinstance(part, RemoteArray):
            pieces.extend(part.pieces)
        else:
            pieces.append(part.astype(dtype, copy=False))
    # It quacks like an array; numpy has no class for one without memory.
    return cast(Array, RemoteArray(pieces, parts[0].shape[1:], dtype))


class RemoteTensor(Tensor):
    """[N, ...] a tensor by reference: the rows of sequence after sequence.

    Any operation but ``select_sequences`` fetches it.
    """

    sequences: list[Array]
    """One array a sequence; some or all of them ``RemoteArray``."""

    @staticmethod
    def __new__(cls, sequences: Sequence[Array]) -> RemoteTensor:
        rows = sum(len(array) for array in sequences)
        dtype = torch.from_numpy(np.empty(0, sequences[0].dtype)).dtype
        return torch.Tensor._make_wrapper_subclass(cls, (rows, *sequences[0].shape[1:]), dtype=dtype)

    def __init__(self, sequences: Sequence[Array]) -> None:
        self.sequences = list(sequences)

    def select_sequences(self, indices: Sequence[int]) -> Tensor:
        """The rows of some sequences, in that order, by reference."""
        chosen = [self.sequences[i] for i in indices]
        return RemoteTensor(chosen) if chosen else torch.empty((0, *self.shape[1:]), dtype=self.dtype)

    def fetch(self) -> Tensor:
        """An ordinary tensor."""
        return torch.from_numpy(np.concatenate([np.asarray(array) for array in self.sequences]))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a function, and calls it as a classmethod
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        at_hand = tree_map_only(RemoteTensor, RemoteTensor.fetch, (args, kwargs or {}))
        return func(*at_hand[0], **at_hand[1])

    # What torch answers without dispatching, from memory that is not there.

    def numpy(self, *, force: bool = False) -> Array:
        return self.fetch().numpy(force=force)

    def tolist(self) -> Any:
        return self.fetch().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return RemoteTensor, (self.sequences,)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's takes one argument more
        return f"RemoteTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def per_sequence(values: Tensor, lengths: Sequence[int]) -> list[Array]:
    """[T, ...] values of packed sequences as one array a sequence, floating-point ones in float32; by reference if they
    are.
    """
    dtype = torch.float32 if values.is_floating_point() else values.dtype
    if isinstance(values, RemoteTensor) and values.dtype == dtype:
        return values.sequences
    array = values.to(dtype).numpy()
    return [array[start:stop] for start, stop in pairwise([0, *accumulate(lengths)])]


@pickled_by_position
@dataclass(slots=True, frozen=True, eq=False)
class RemoteText:
    """A text by reference: UTF-8 bytes of a block."""

    rows: Rows

    def fetch(self) -> str:
        """The text."""
        return self.rows.fetch().tobytes().decode("utf-8", errors="surrogatepass")


class RemoteCompletion(Completion):
    """A completion by reference: its arrays are ``RemoteArray``, and its text is fetched when it is looked at."""

    __slots__ = ("remote_text",)
    remote_text: str | RemoteText

    @property
    def text(self) -> str:
        stored = self.remote_text
        return stored.fetch() if isinstance(stored, RemoteText) else stored

    @text.setter
    def text(self, text: str | RemoteText) -> None:
        object.__setattr__(self, "remote_text", text)

    def fetch(self) -> Completion:
        """An ordinary completion."""
        return Completion(
            request_id=self.request_id,
            token_ids=np.asarray(self.token_ids),
            logprobs=np.asarray(self.logprobs),
            basis=self.basis,
            finish_reason=self.finish_reason,
            sampling=self.sampling,
            version_spans=self.version_spans,
            raw_logprobs=None if self.raw_logprobs is None else np.asarray(self.raw_logprobs),
            text=self.text,
            num_cached_tokens=self.num_cached_tokens,
            token_data={name: np.asarray(values) for name, values in self.token_data.items()},
            prompt_ids=None if self.prompt_ids is None else np.asarray(self.prompt_ids),
            prompt_token_data={name: np.asarray(values) for name, values in self.prompt_token_data.items()},
        )

    def __getstate__(self) -> list[Any]:
        return [self.remote_text if name == "text" else getattr(self, name) for name in Completion.__match_args__]

    def __setstate__(self, state: list[Any]) -> None:
        for name, value in zip(Completion.__match_args__, state, strict=True):
            object.__setattr__(self, name, value)
