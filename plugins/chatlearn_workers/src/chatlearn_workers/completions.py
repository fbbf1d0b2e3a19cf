"""Transport of a replica's completions: facts for the driver, and arrays and texts of all completions in one block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from chatlearn_core.types import Completion, FinishReason, LogprobBasis, SamplingParams, TextRef, VersionSpan
from chatlearn_core.types.array_ref import Array, ArrayRef, Block, Rows
from chatlearn_core.types.pickling import pickled_by_position

TEXT = "text"
DATA, PROMPT_DATA = "token_data/", "prompt_token_data/"


Place = tuple[str, int, int]
"""Name of an array in the block, and its rows [start, stop)."""


@pickled_by_position
@dataclass(slots=True, frozen=True)
class CompletionFacts:
    """A completion without its arrays. Its size does not depend on the completion's length."""

    request_id: str
    basis: LogprobBasis | None
    """None means the basis of the request's sampling."""
    finish_reason: FinishReason
    sampling: SamplingParams | None
    """None means the request's."""
    version_spans: tuple[VersionSpan, ...]
    num_cached_tokens: int
    places: Mapping[str, Place]
    """Places of ``token_ids``, ``logprobs``, ``text``, optionally ``raw_logprobs`` and ``prompt_ids``, and of token
    data as ``token_data/name`` and ``prompt_token_data/name``."""
    score: float | None = None


class CompletionPacker:
    """Concatenates the arrays of completions that share name, dtype and row shape."""

    def __init__(self) -> None:
        self._arrays: dict[str, list[Array]] = {}
        self._rows: dict[str, int] = {}

    def add(self, completion: Completion, sampling: SamplingParams) -> CompletionFacts:
        """Add a completion that answers a request with this ``sampling``; returns its facts."""
        places = {
            "token_ids": self._put("token_ids", np.asarray(completion.token_ids, dtype=np.int64)),
            "logprobs": self._put("logprobs", np.asarray(completion.logprobs, dtype=np.float32)),
            TEXT: self._put(TEXT, np.frombuffer(completion.text.encode("utf-8", "surrogatepass"), np.uint8)),
        }
        if completion.raw_logprobs is not None:
            places["raw_logprobs"] = self._put("raw_logprobs", np.asarray(completion.raw_logprobs, dtype=np.float32))
        if completion.prompt_ids is not None:
            places["prompt_ids"] = self._put("prompt_ids", np.asarray(completion.prompt_ids, dtype=np.int64))
        for kind, data in ((DATA, completion.token_data), (PROMPT_DATA, completion.prompt_token_data)):
            for name, values in data.items():
                places[kind + name] = self._put(kind + name, np.asarray(values))
        return CompletionFacts(
            completion.request_id,
            None if completion.basis == sampling.basis else completion.basis,
            completion.finish_reason,
            None if completion.sampling == sampling else completion.sampling,
            completion.version_spans,
            completion.num_cached_tokens,
            places,
            completion.score,
        )

    def _put(self, name: str, array: Array) -> Place:
        key = f"{name} {array.dtype.str} {array.shape[1:]}"
        start = self._rows.get(key, 0)
        self._arrays.setdefault(key, []).append(array)
        self._rows[key] = start + len(array)
        return key, start, start + len(array)

    def block(self) -> dict[str, Array]:
        """The block of all added arrays."""
        return {key: np.concatenate(arrays) for key, arrays in self._arrays.items()}


def completion_of(facts: CompletionFacts, block: Block, sampling: SamplingParams) -> Completion:
    """The completion, by reference.

    Args:
        sampling: the request's sampling.
    """
    owner = facts.request_id
    arrays = {name: _stored(place, block, owner, name) for name, place in facts.places.items() if name != TEXT}
    text: Any = TextRef(_rows(facts.places[TEXT], block), owner)
    return Completion(
        request_id=facts.request_id,
        token_ids=arrays["token_ids"],
        logprobs=arrays["logprobs"],
        basis=facts.basis or sampling.basis,
        finish_reason=facts.finish_reason,
        sampling=facts.sampling or sampling,
        version_spans=facts.version_spans,
        raw_logprobs=arrays.get("raw_logprobs"),
        text=text,
        num_cached_tokens=facts.num_cached_tokens,
        token_data=_data(arrays, DATA),
        prompt_ids=arrays.get("prompt_ids"),
        prompt_token_data=_data(arrays, PROMPT_DATA),
        score=facts.score,
    )


def _data(arrays: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {name.removeprefix(kind): array for name, array in arrays.items() if name.startswith(kind)}


def _rows(place: Place, block: Block) -> Rows:
    key, start, stop = place
    return Rows(block, key, start, stop)


def _stored(place: Place, block: Block, owner: str, name: str) -> Any:
    tail, dtype = _shape(place[0])
    return ArrayRef([_rows(place, block)], tail, dtype, owner, name.rpartition("/")[2])


@cache
def _shape(key: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Row shape and dtype of an array with this key."""
    _, dtype, tail = key.split(" ", 2)
    return tuple(int(n) for n in tail.strip("()").split(",") if n.strip()), np.dtype(dtype)
