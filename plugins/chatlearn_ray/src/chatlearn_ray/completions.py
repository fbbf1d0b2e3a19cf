"""Completions on their way from a replica: facts for the driver, arrays and texts of all of them in one block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from chatlearn_core.types import Completion, FinishReason, LogprobBasis, SamplingParams, StoredText, VersionSpan
from chatlearn_core.types.stored import Array, Block, Rows, StoredArray, StoredCompletion

TEXT = "text"


@dataclass(slots=True, frozen=True)
class Place:
    """Where one array of a completion lies in the block."""

    key: str
    start: int
    stop: int


@dataclass(slots=True, frozen=True)
class CompletionFacts:
    """A completion without its arrays. What it takes does not depend on the completion's length."""

    request_id: str
    basis: LogprobBasis
    finish_reason: FinishReason
    sampling: SamplingParams
    version_spans: tuple[VersionSpan, ...]
    num_cached_tokens: int
    places: Mapping[str, Place]
    """Of ``token_ids``, ``logprobs``, ``text``, perhaps ``raw_logprobs``, and of token data as ``token_data/name``."""


class CompletionPacker:
    """Lays the arrays of completions end to end, those of one name, type and row shape together."""

    def __init__(self) -> None:
        self._arrays: dict[str, list[Array]] = {}
        self._rows: dict[str, int] = {}

    def add(self, completion: Completion) -> CompletionFacts:
        """Take one over."""
        places = {
            "token_ids": self._put("token_ids", np.asarray(completion.token_ids, dtype=np.int64)),
            "logprobs": self._put("logprobs", np.asarray(completion.logprobs, dtype=np.float32)),
            TEXT: self._put(TEXT, np.frombuffer(completion.text.encode("utf-8", "surrogatepass"), np.uint8)),
        }
        if completion.raw_logprobs is not None:
            places["raw_logprobs"] = self._put("raw_logprobs", np.asarray(completion.raw_logprobs, dtype=np.float32))
        for name, values in completion.token_data.items():
            places[f"token_data/{name}"] = self._put(f"token_data/{name}", np.asarray(values))
        return CompletionFacts(
            completion.request_id,
            completion.basis,
            completion.finish_reason,
            completion.sampling,
            completion.version_spans,
            completion.num_cached_tokens,
            places,
        )

    def _put(self, name: str, array: Array) -> Place:
        key = f"{name} {array.dtype.str} {array.shape[1:]}"
        start = self._rows.get(key, 0)
        self._arrays.setdefault(key, []).append(array)
        self._rows[key] = start + len(array)
        return Place(key, start, start + len(array))

    def block(self) -> dict[str, Array]:
        """Everything that was added."""
        return {key: np.concatenate(arrays) for key, arrays in self._arrays.items()}


def completion_of(facts: CompletionFacts, block: Block) -> Completion:
    """The completion by reference."""
    arrays = {name: _stored(place, block) for name, place in facts.places.items() if name != TEXT}
    text: Any = StoredText(_rows(facts.places[TEXT], block))
    return StoredCompletion(
        request_id=facts.request_id,
        token_ids=arrays["token_ids"],
        logprobs=arrays["logprobs"],
        basis=facts.basis,
        finish_reason=facts.finish_reason,
        sampling=facts.sampling,
        version_spans=facts.version_spans,
        raw_logprobs=arrays.get("raw_logprobs"),
        text=text,
        num_cached_tokens=facts.num_cached_tokens,
        token_data={
            name.removeprefix("token_data/"): array for name, array in arrays.items() if name.startswith("token_data/")
        },
    )


def _rows(place: Place, block: Block) -> Rows:
    return Rows(block, place.key, place.start, place.stop)


def _stored(place: Place, block: Block) -> Any:
    _, dtype, tail = place.key.split(" ", 2)
    shape = tuple(int(n) for n in tail.strip("()").split(",") if n.strip())
    return StoredArray([_rows(place, block)], shape, dtype)
