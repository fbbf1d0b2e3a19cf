"""Encodes samples for reward workers: references stay references, and masks and similar arrays become runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from chatlearn_core.types import ArrayRef, Sample
from chatlearn_core.types.array_ref import fill
from chatlearn_workers.blocks import Traffic

_MAX_RUNS = 8
"""Arrays with more runs of equal values are sent unencoded."""


def travelling_samples(samples: Sequence[Sample], traffic: Traffic) -> list[Sample]:
    """The samples in the form that is sent. Prompt tokens shared by several samples are sent once."""
    sent: list[Sample] = []
    prompts: set[int] = set()
    for sample, mask in zip(samples, _short_masks(samples), strict=True):
        token_data = {name: _short(values) for name, values in sample.token_data.items()}
        prompt_ids = sample.prompt.token_ids
        if id(prompt_ids) not in prompts:
            prompts.add(id(prompt_ids))
            traffic.driver_bytes += prompt_ids.nbytes
        for array in (sample.token_ids, mask, *token_data.values()):
            traffic.driver_bytes += sum(part.nbytes for part in _at_hand(array) if part is not prompt_ids)
        sent.append(replace(sample, loss_mask=mask, token_data=token_data))
    return sent


def _short_masks(samples: Sequence[Sample]) -> list[Any]:
    """The loss mask of each sample, encoded. Changes are sought in all masks at once, since most samples are short."""
    if not samples:
        return []
    bounds = np.cumsum([0, *(len(sample.loss_mask) for sample in samples)])
    together = np.concatenate([sample.loss_mask for sample in samples])
    changes = np.flatnonzero(together[1:] != together[:-1]) + 1
    firsts = np.searchsorted(changes, bounds, side="right").tolist()  # a change at a bound is none
    lasts = np.searchsorted(changes, bounds, side="left").tolist()
    starts = bounds.tolist()
    encoded: list[Any] = []
    for i, sample in enumerate(samples):
        first, last = firsts[i], lasts[i + 1]
        if starts[i] == starts[i + 1] or last - first >= _MAX_RUNS:
            encoded.append(sample.loss_mask)
            continue
        edges = [starts[i], *changes[first:last].tolist(), starts[i + 1]]
        runs = [fill(bool(together[start]), stop - start) for start, stop in pairwise(edges)]
        encoded.append(ArrayRef(runs, (), np.bool_))
    return encoded


def _at_hand(array: Any) -> Iterator[np.ndarray]:
    """The parts of an array that a message carries."""
    for piece in array.pieces if isinstance(array, ArrayRef) else (array,):
        if isinstance(piece, np.ndarray):
            yield piece


def _short(array: Any) -> Any:
    """An array with few runs of equal values, encoded as these runs."""
    if isinstance(array, ArrayRef) or array.ndim != 1 or not len(array) or array.dtype.kind not in "bi":
        return array
    changes = np.flatnonzero(array[1:] != array[:-1]) + 1
    if len(changes) >= _MAX_RUNS:
        return array
    bounds = pairwise([0, *changes.tolist(), len(array)])
    return ArrayRef([fill(array[start].item(), stop - start) for start, stop in bounds], (), array.dtype)
