"""Blocks of arrays in Ray's object store: written by the worker that made them, read where they are needed.

A worker's call returns small facts, which the driver reads, and one block, of which the driver holds the reference. The
driver owns it, so a block outlives the worker that made it, though not the node; a reader on the same node gets views
of the store's memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from chatlearn_core.exceptions import TrainerLostError
from chatlearn_core.types import GenerateRequest, Sample, StoredArray, StoredCompletion, StoredText
from chatlearn_core.types.stored import Array, Rows
from chatlearn_ray.runs import RunArray

FETCH_TIMEOUT_S = 600.0
"""Longest wait for blocks from other nodes; a lost one is noticed sooner."""


@dataclass(slots=True)
class Traffic:
    """What moved since somebody last asked. One object a runtime."""

    stored_bytes: int = 0
    """Put into the object store, by the driver and by workers."""
    driver_bytes: int = 0
    """Values that passed through the driver: what it put there or sent, and what it looked at."""
    driver_s: float = 0.0
    """How long the driver took for that."""

    def taken(self) -> Traffic:
        """The amounts until now; they start again at zero."""
        until_now = replace(self)
        self.stored_bytes, self.driver_bytes, self.driver_s = 0, 0, 0.0
        return until_now


class RayBlock:
    """A ``Block`` of the core: named arrays behind one reference.

    Args:
        traffic: counts what is looked at; only the driver has it.
    """

    __slots__ = ("_arrays", "reference", "traffic")

    def __init__(self, reference: Any, traffic: Traffic | None = None) -> None:
        self.reference = reference
        self.traffic = traffic
        self._arrays: Mapping[str, Array] | None = None

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Rows of one array.

        Raises:
            TrainerLostError: the node that held them is gone.
        """
        begin = time.perf_counter()
        if self._arrays is None:
            fetch_blocks([self])
        assert self._arrays is not None
        rows = self._arrays[name][start:stop]
        if self.traffic is not None:
            self.traffic.driver_bytes += rows.nbytes
            self.traffic.driver_s += time.perf_counter() - begin
        return rows

    def fill(self, arrays: Mapping[str, Array]) -> None:
        """The arrays are here."""
        self._arrays = arrays

    @property
    def is_here(self) -> bool:
        """Whether the arrays were fetched."""
        return self._arrays is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return RayBlock, (self.reference,)


def fetch_blocks(blocks: Iterable[RayBlock]) -> None:
    """Get all that are not here yet, at the same time. Blocks the thread.

    Raises:
        TrainerLostError: a node that held some is gone; the step they belong to has to be made again.
    """
    missing = [block for block in blocks if not block.is_here]
    references = list({block.reference: None for block in missing})
    if not references:
        return
    try:
        found = dict(zip(references, ray.get(references, timeout=FETCH_TIMEOUT_S), strict=True))
    except GetTimeoutError:
        raise TrainerLostError(
            f"{len(references)} block(s) of sampled tokens did not arrive within {FETCH_TIMEOUT_S:g} s from the nodes "
            "that hold them. The step has to be made again"
        ) from None
    except RayError as error:
        raise TrainerLostError(
            f"sampled tokens were lost with the node that held them, and the step has to be made again: "
            f"{type(error).__name__}: {str(error).splitlines()[0]}"
        ) from None
    for block in missing:
        block.fill(found[block.reference])


def blocks_of(arrays: Iterable[Any]) -> list[RayBlock]:
    """The blocks behind whatever of these is stored."""
    blocks: dict[int, RayBlock] = {}
    for array in arrays:
        rows: Sequence[Any] = array.pieces if isinstance(array, StoredArray) else ()
        if isinstance(array, StoredText):
            rows = (array.rows,)
        for piece in rows:
            if isinstance(piece, Rows) and isinstance(piece.block, RayBlock):
                blocks[id(piece.block)] = piece.block
    return list(blocks.values())


def travelling_samples(samples: Sequence[Sample], traffic: Traffic) -> list[Sample]:
    """The samples as they are sent: what they hold by reference stays one, masks and the like are told in short."""
    sent: list[Sample] = []
    for sample in samples:
        mask = _short(sample.loss_mask)
        token_data = {name: _short(values) for name, values in sample.token_data.items()}
        traffic.driver_bytes += sum(map(_bytes_at_hand, (sample.token_ids, mask, *token_data.values())))
        sent.append(replace(sample, loss_mask=mask, token_data=token_data))
    return sent


def _bytes_at_hand(array: Any) -> int:
    """What of an array travels with a message."""
    if isinstance(array, StoredArray):
        return sum(piece.nbytes for piece in array.pieces if not isinstance(piece, Rows))
    return int(array.nbytes)


def _short(array: Any) -> Any:
    return array if isinstance(array, StoredArray) else RunArray.of(array) or array


def _whole(array: Any) -> Any:
    return array.array() if isinstance(array, RunArray) else np.asarray(array)


def fetched_samples(samples: Sequence[Sample]) -> list[Sample]:
    """The samples as they were before they travelled, with ordinary arrays. Blocks the thread until they are here."""
    fetch_blocks(blocks_of(array for sample in samples for array in _arrays_of_sample(sample)))
    return [
        replace(
            sample,
            token_ids=np.asarray(sample.token_ids),
            completion=fetched_completion(sample.completion),
            loss_mask=_whole(sample.loss_mask),
            token_data={name: _whole(values) for name, values in sample.token_data.items()},
        )
        for sample in samples
    ]


def fetched_completion(completion: Any) -> Any:
    """An ordinary completion, or what is none."""
    return completion.fetch() if isinstance(completion, StoredCompletion) else completion


def fetched_request(request: GenerateRequest) -> GenerateRequest:
    """The request with what it resumes from at hand. Blocks the thread until it is here."""
    if not isinstance(request.resume_from, StoredCompletion):
        return request
    fetch_blocks(blocks_of(_arrays_of_completion(request.resume_from)))
    return replace(request, resume_from=request.resume_from.fetch())


def _arrays_of_sample(sample: Sample) -> list[Any]:
    completion = sample.completion
    parts = _arrays_of_completion(completion) if isinstance(completion, StoredCompletion) else []
    return [sample.token_ids, *sample.token_data.values(), *parts]


def _arrays_of_completion(completion: StoredCompletion) -> list[Any]:
    return [
        completion.token_ids,
        completion.logprobs,
        completion.raw_logprobs,
        completion.stored_text,
        *completion.token_data.values(),
    ]
