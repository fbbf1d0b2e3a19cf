"""Blocks of arrays in the runtime's store: written by the worker that made them, read by the processes that need them.

A worker's call returns small facts, which the driver reads, and one block, to which the driver holds the reference. The
driver owns the block, so it outlives its worker; a reader on the same node gets views of the store's memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from chatlearn_core.exceptions import TrainerLostError
from chatlearn_core.protocols import DataStore
from chatlearn_core.types import ArrayRef, Block, GenerateRequest, values_of
from chatlearn_core.types.array_ref import Array
from chatlearn_workers.rpc import ObjectStore, StoredValueLostError

FETCH_TIMEOUT_S = 600.0
"""Timeout for blocks from other nodes, seconds; a lost block is noticed sooner."""


@dataclass(slots=True)
class Traffic:
    """Amounts of data moved since they were last taken. One object per runtime."""

    stored_bytes: int = 0
    """Bytes put into the object store by the driver and by workers."""
    driver_bytes: int = 0
    """Bytes of values that passed through the driver: those it stored or sent, and those its ``DataStore`` fetched."""
    driver_s: float = 0.0
    """Time that the driver spent on this, seconds."""

    def taken(self) -> Traffic:
        """Return the amounts so far and reset them to zero."""
        until_now = replace(self)
        self.stored_bytes, self.driver_bytes, self.driver_s = 0, 0, 0.0
        return until_now


class StoredBlock:
    """A ``Block`` of the core: named arrays behind one reference.

    Args:
        store: holds the arrays.
        reference: reference to the arrays, which are one value of the store.
        traffic: counts the bytes read; only the driver has it.
    """

    __slots__ = ("_arrays", "reference", "store", "traffic")

    def __init__(self, store: ObjectStore, reference: Any, traffic: Traffic | None = None) -> None:
        self.store = store
        self.reference = reference
        self.traffic = traffic
        self._arrays: Mapping[str, Array] | None = None

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Rows of one array."""
        assert self._arrays is not None, "a store brings a block before its rows are read"
        rows = self._arrays[name][start:stop]
        if self.traffic is not None:
            self.traffic.driver_bytes += rows.nbytes
        return rows

    def fill(self, arrays: Mapping[str, Array]) -> None:
        """The arrays are here."""
        self._arrays = arrays

    @property
    def is_here(self) -> bool:
        """Whether the arrays have been fetched."""
        return self._arrays is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredBlock, (self.store, self.reference)


def fetch_blocks(blocks: Iterable[StoredBlock]) -> None:
    """Fetch all missing blocks concurrently; they must belong to one store. Blocks the thread.

    Raises:
        TrainerLostError: a node that held some of them is gone; their step must be repeated.
    """
    missing = [block for block in blocks if not block.is_here]
    references = list({block.reference: None for block in missing})
    if not references:
        return
    try:
        found = dict(zip(references, missing[0].store.get(references, FETCH_TIMEOUT_S), strict=True))
    except TimeoutError:
        raise TrainerLostError(
            f"{len(references)} block(s) of sampled tokens did not arrive within {FETCH_TIMEOUT_S:g} s from the nodes "
            "that hold them. The step has to be made again"
        ) from None
    except StoredValueLostError as error:
        raise TrainerLostError(
            f"sampled tokens were lost with the node that held them, and the step has to be made again: {error}"
        ) from None
    for block in missing:
        block.fill(found[block.reference])


class BlockStore(DataStore):
    """The ``DataStore`` of a run over worker processes: fetches values from blocks. Workers have one, too."""

    def __init__(self, traffic: Traffic | None = None) -> None:
        self._traffic = traffic

    def bring(self, blocks: Sequence[Block]) -> None:
        """See ``DataStore``."""
        begin = time.perf_counter()
        fetch_blocks(block for block in blocks if isinstance(block, StoredBlock))
        if self._traffic is not None:
            self._traffic.driver_s += time.perf_counter() - begin

    def get_request(self, request: GenerateRequest) -> GenerateRequest:
        """The request, and the completion it resumes, with plain arrays. Blocks the thread.

        Raises:
            TrainerLostError: see ``DataStore.bring``.
        """
        arrays: tuple[Any, ...] = (request.prompt_ids, request.forced_ids)
        refs = [array for array in arrays if isinstance(array, ArrayRef)]
        self.bring([block for ref in refs for block in ref.blocks])
        prior = request.resume_from
        return replace(
            request,
            prompt_ids=values_of(request.prompt_ids),
            forced_ids=None if request.forced_ids is None else values_of(request.forced_ids),
            resume_from=None if prior is None else self.get_completions([prior])[0],
        )


def has_references(request: GenerateRequest) -> bool:
    """Whether tokens of a request, or of the completion it resumes, stay with a worker."""
    prior = request.resume_from
    arrays = (request.prompt_ids, request.forced_ids, None if prior is None else prior.token_ids)
    return any(isinstance(array, ArrayRef) for array in arrays)


def bytes_here(array: Array | ArrayRef) -> int:
    """Bytes of an array that a message carries; stored rows do not count."""
    pieces = array.pieces if isinstance(array, ArrayRef) else (array,)
    return sum(piece.nbytes for piece in pieces if isinstance(piece, np.ndarray))
