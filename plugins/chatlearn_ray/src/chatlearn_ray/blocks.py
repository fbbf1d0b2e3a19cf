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

import ray
from ray.exceptions import GetTimeoutError, RayError

from chatlearn_core.exceptions import TrainerLostError
from chatlearn_core.types import GenerateRequest, StoredArray, StoredCompletion, StoredText
from chatlearn_core.types.stored import Array, Rows

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


def fetched_completion(completion: Any) -> Any:
    """An ordinary completion, or what is none."""
    return completion.fetch() if isinstance(completion, StoredCompletion) else completion


def fetched_request(request: GenerateRequest) -> GenerateRequest:
    """The request with what it resumes from at hand. Blocks the thread until it is here."""
    if not isinstance(request.resume_from, StoredCompletion):
        return request
    fetch_blocks(blocks_of(arrays_of_completion(request.resume_from)))
    return replace(request, resume_from=request.resume_from.fetch())


def arrays_of_completion(completion: StoredCompletion) -> list[Any]:
    """Whatever of it may be stored."""
    return [
        completion.token_ids,
        completion.logprobs,
        completion.raw_logprobs,
        completion.stored_text,
        *completion.token_data.values(),
    ]
