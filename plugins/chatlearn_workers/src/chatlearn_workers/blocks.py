"""Blocks of arrays in the runtime's store: written by the worker that made them, read where they are needed.

A worker's call returns small facts, which the driver reads, and one block, of which the driver holds the reference. The
driver owns it, so a block outlives the worker that made it; a reader on the same node gets views of the store's memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chatlearn_core.exceptions import TrainerLostError
from chatlearn_core.types import GenerateRequest, RemoteArray, RemoteCompletion, RemoteText
from chatlearn_core.types.remote import Array, Rows
from chatlearn_workers.rpc import ObjectStore, StoredValueLostError

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


class StoredBlock:
    """A ``Block`` of the core: named arrays behind one reference.

    Args:
        store: where its arrays are.
        reference: of the arrays, which are one value of the store.
        traffic: counts what is looked at; only the driver has it.
    """

    __slots__ = ("_arrays", "reference", "store", "traffic")

    def __init__(self, store: ObjectStore, reference: Any, traffic: Traffic | None = None) -> None:
        self.store = store
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
        return StoredBlock, (self.store, self.reference)


def fetch_blocks(blocks: Iterable[StoredBlock]) -> None:
    """Get all that are not here yet, at the same time; they are of one store. Blocks the thread.

    Raises:
        TrainerLostError: a node that held some is gone; the step they belong to has to be made again.
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


def blocks_of(arrays: Iterable[Any]) -> list[StoredBlock]:
    """The blocks behind whatever of these is stored."""
    blocks: dict[int, StoredBlock] = {}
    for array in arrays:
        rows: Sequence[Any] = array.pieces if isinstance(array, RemoteArray) else ()
        if isinstance(array, RemoteText):
            rows = (array.rows,)
        for piece in rows:
            if isinstance(piece, Rows) and isinstance(piece.block, StoredBlock):
                blocks[id(piece.block)] = piece.block
    return list(blocks.values())


def fetched_request(request: GenerateRequest) -> GenerateRequest:
    """The request with what it resumes from at hand. Blocks the thread until it is here."""
    if not isinstance(request.resume_from, RemoteCompletion):
        return request
    fetch_blocks(blocks_of(arrays_of_completion(request.resume_from)))
    return replace(request, resume_from=request.resume_from.fetch())


def arrays_of_completion(completion: RemoteCompletion) -> list[Any]:
    """Whatever of it may be stored."""
    return [
        completion.token_ids,
        completion.logprobs,
        completion.raw_logprobs,
        completion.remote_text,
        *completion.token_data.values(),
        completion.prompt_ids,
        *completion.prompt_token_data.values(),
    ]
