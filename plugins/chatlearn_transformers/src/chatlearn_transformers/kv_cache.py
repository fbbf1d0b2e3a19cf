"""The KV cache of all running sequences: one row per sequence, rows 0..n-1 in use, each with its own length."""

from __future__ import annotations

from torch import Tensor
from transformers import Cache

LENGTH_STEP = 32
"""Columns are allocated in multiples of this number."""
READ_STEP = 8
"""Columns are read in multiples of this number: decoding small models is bound by cache reads, and shapes repeat."""


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is at least ``value``."""
    return -(-value // step) * step


class SlotCache(Cache):
    """Keys and values, [rows, heads, columns, head dimension] per layer, preallocated and grown by doubling.

    Each forward is announced by ``expect_prefill`` or ``expect_decode``; the model then calls ``update`` once per
    layer. Prefill starts sequences in fresh rows; equal prompts share one computation. Decoding writes one token per
    row at that row's length and reads all rows up to a common width, so the caller must mask columns beyond a row's
    length. New buffers are zeroed, because masked values must still be finite.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._bytes_per_token: int | None = None
        self._capacity = (0, 0)
        self._row_start = 0
        self._sources: Tensor | None = None
        self._num_copies = 0
        self._columns: Tensor | None = None
        self._row_index: Tensor | None = None
        self._width = 0

    @property
    def num_bytes(self) -> int:
        """Allocated memory in bytes."""
        return sum(t.numel() * t.element_size() for t in self._buffers())

    @property
    def bytes_per_token(self) -> int | None:
        """Memory of one token of one sequence, measured, also known after ``clear``; None before the first forward."""
        rows, columns = self._capacity
        if self._keys and rows and columns:
            self._bytes_per_token = self.num_bytes // (rows * columns)
        return self._bytes_per_token

    def reserve(self, num_rows: int, num_columns: int, most_columns: int = 0) -> None:
        """Make room for ``num_rows`` sequences of ``num_columns`` tokens, keeping the content.

        Args:
            num_rows: number of sequences.
            num_columns: number of tokens of the longest.
            most_columns: number that the longest may have in the end; room is made for them at once where that at most
                doubles ``num_columns``.
        """
        rows, columns = self._capacity
        if num_rows <= rows and num_columns <= columns:
            return
        if num_columns > columns:
            needed = round_up(num_columns, LENGTH_STEP)
            most = round_up(most_columns, LENGTH_STEP)
            columns = max(needed, most if most <= 2 * needed else 0, 2 * columns if columns else 0)
        if num_rows > rows:
            rows = max(num_rows, 2 * rows if rows else 0)
        self._capacity = (rows, columns)
        for tensors in (self._keys, self._values):
            for layer, old in tensors.items():
                new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                tensors[layer] = new

    def clear(self) -> None:
        """Free the memory and remove all sequences."""
        _ = self.bytes_per_token
        self._keys.clear()
        self._values.clear()
        self._capacity = (0, 0)

    def expect_prefill(self, row_start: int, sources: Tensor | None, num_rows: int) -> None:
        """Announce a forward that computes whole prompts, to be stored in rows [row_start, row_start + num_rows).

        Args:
            row_start: first row.
            sources: [num_rows] index of the computed prompt for each row; None: one each, in order.
            num_rows: number of rows.
        """
        self._row_start, self._sources, self._num_copies = row_start, sources, num_rows
        self._columns = None

    def expect_decode(self, columns: Tensor, row_index: Tensor, width: int) -> None:
        """Announce a forward that computes one token of each of the first N rows.

        Args:
            columns: [N] column that each row writes: its length before this token.
            row_index: [N] 0..N-1
            width: number of columns to read, above every entry of ``columns``.
        """
        self._columns, self._row_index, self._width = columns, row_index, width

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store the new tokens and return the keys and values to attend to; the model's attention calls this."""
        if layer_idx not in self._keys:
            rows, columns = self._capacity
            for tensors, states in ((self._keys, key_states), (self._values, value_states)):
                tensors[layer_idx] = states.new_zeros(rows, states.shape[1], columns, states.shape[3])
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._columns is None:
            rows_taken = slice(self._row_start, self._row_start + self._num_copies)
            length = key_states.shape[2]
            for buffer, states in ((keys, key_states), (values, value_states)):
                buffer[rows_taken, :, :length] = states if self._sources is None else states[self._sources]
            return key_states, value_states
        num_rows = self._columns.shape[0]
        keys[self._row_index, :, self._columns] = key_states[:, :, 0]
        values[self._row_index, :, self._columns] = value_states[:, :, 0]
        return keys[:num_rows, :, : self._width], values[:num_rows, :, : self._width]

    def move(self, sources: Tensor, targets: Tensor, width: int) -> None:
        """Copy the first ``width`` columns of rows ``sources`` [M] over rows ``targets`` [M]."""
        for buffer in self._buffers():
            buffer[targets, :, :width] = buffer[sources, :, :width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always return 0: the caller gives positions and masks, and no model may derive them from the cache."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return length and offset of the result of ``update``."""
        return (query_length if self._columns is None else self._width), 0

    def get_query_offset(self, layer_idx: int = 0) -> int | Tensor:  # type: ignore[override]  # scalar there
        """Return where a forward's queries begin: 0 for prompts; in decoding [N], for ``attention.slot_mask``."""
        return 0 if self._columns is None else self._columns

    def _buffers(self) -> tuple[Tensor, ...]:
        return (*self._keys.values(), *self._values.values())
