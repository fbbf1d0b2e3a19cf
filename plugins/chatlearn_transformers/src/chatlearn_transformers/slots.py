"""State of the running sequences: one array per quantity, one row per sequence, rows 0..n-1 in use."""

from __future__ import annotations

import numpy as np

_FIELDS: dict[str, type] = {
    "lengths": np.int64,
    "counts": np.int64,
    "limits": np.int64,
    "seeds": np.uint64,
    "temperature": np.float32,
    "top_p": np.float32,
    "top_k": np.int64,
    "stops_at_eos": np.bool_,
}
_HISTORY: dict[str, type] = {"token_ids": np.int64, "logprobs": np.float32, "raw_logprobs": np.float32}


class SlotTable:
    """Host-side state of the sequences, in the order of the KV cache's rows.

    Attributes:
        lengths: [R] number of tokens in the KV cache.
        counts: [R] number of completion tokens so far, including resumed ones.
        limits: [R] largest number of completion tokens.
        seeds: [R] keys of the random numbers.
        temperature: [R] 0 is greedy.
        top_p: [R]
        top_k: [R] 0 is off.
        stops_at_eos: [R]
        stop_ids: [R, K] further stop tokens, -1 for unused entries.
        token_ids: [R, T] completion tokens.
        logprobs: [R, T]
        raw_logprobs: [R, T]
    """

    def __init__(self) -> None:
        for name, dtype in _FIELDS.items():
            setattr(self, name, np.zeros(0, dtype=dtype))
        for name, dtype in _HISTORY.items():
            setattr(self, name, np.zeros((0, 0), dtype=dtype))
        self.stop_ids = np.full((0, 0), -1, dtype=np.int64)

    lengths: np.ndarray[tuple[int], np.dtype[np.int64]]
    counts: np.ndarray[tuple[int], np.dtype[np.int64]]
    limits: np.ndarray[tuple[int], np.dtype[np.int64]]
    seeds: np.ndarray[tuple[int], np.dtype[np.uint64]]
    temperature: np.ndarray[tuple[int], np.dtype[np.float32]]
    top_p: np.ndarray[tuple[int], np.dtype[np.float32]]
    top_k: np.ndarray[tuple[int], np.dtype[np.int64]]
    stops_at_eos: np.ndarray[tuple[int], np.dtype[np.bool_]]
    stop_ids: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    token_ids: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    logprobs: np.ndarray[tuple[int, int], np.dtype[np.float32]]
    raw_logprobs: np.ndarray[tuple[int, int], np.dtype[np.float32]]

    def reserve(self, num_rows: int, num_tokens: int, num_stop_ids: int) -> None:
        """Make room, keeping the content."""
        rows = max(num_rows, len(self.lengths))
        for name in _FIELDS:
            setattr(self, name, _grown(getattr(self, name), (rows,), 0))
        for name in _HISTORY:
            old = getattr(self, name)
            setattr(self, name, _grown(old, (rows, max(num_tokens, old.shape[1])), 0))
        self.stop_ids = _grown(self.stop_ids, (rows, max(num_stop_ids, self.stop_ids.shape[1])), -1)

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy rows ``sources`` over rows ``targets``."""
        for name in (*_FIELDS, *_HISTORY, "stop_ids"):
            array = getattr(self, name)
            array[targets] = array[sources]


def _grown(old: np.ndarray, shape: tuple[int, ...], fill: int) -> np.ndarray:
    if old.shape == shape:
        return old
    new = np.full(shape, fill, dtype=old.dtype) if fill else np.zeros(shape, dtype=old.dtype)
    new[tuple(slice(0, size) for size in old.shape)] = old
    return new
