"""Where per-token data is kept, and how code in the driver asks for its values: by sample and field, never by touching.

Over several processes, what generators sample and trainers compute stays with the workers; samples hold references to
it (``ArrayRef``), which executor, buffer and splitting pass on. In one process samples hold plain arrays.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from chatlearn_core.exceptions import BackendError
from chatlearn_core.types import ArrayRef, Block, Completion, Sample, TensorRef, TextRef, Turn, values_of

T = TypeVar("T")
_SEQUENCE = ("token_ids", "loss_mask")
_COMPLETION = ("token_ids", "logprobs", "raw_logprobs", "prompt_ids")
TEXT = "text"


@runtime_checkable
class ReadsSamples(Protocol):
    """Optional part of what runs in the driver (sample filters, samplers, losses): which values it looks at.

    Example: a filter of repeated completions has ``reads = frozenset({"token_ids"})``.
    """

    @property
    def reads(self) -> Collection[str]:
        """Fields (``DataStore.get``) that have plain arrays when it is called; the executor gets them in one call. For
        a loss, those that ``prepare`` looks at."""


def fields_read_by(reader: object) -> frozenset[str]:
    """The fields that a filter, sampler or loss declares; none by default."""
    return frozenset(reader.reads) if isinstance(reader, ReadsSamples) else frozenset()


class DataStore(ABC):
    """Brings the values behind references into this process. A runtime subclasses it and implements ``bring``.

    Fields of a sample: ``token_ids``, ``loss_mask``, ``text`` (of all turns), and the names of its ``token_data``. A
    stored value lives until the last sample, completion or batch that refers to it is gone; there is no other release.
    """

    @abstractmethod
    def bring(self, blocks: Sequence[Block]) -> None:
        """Fetch the blocks that are not in this process yet, all at the same time. Blocks the thread.

        Raises:
            TrainerLostError: the node that held one is gone, or it does not arrive in time; the step has to be made
                again.
        """

    def get(self, samples: Sequence[Sample], fields: Collection[str] | None = None) -> list[Sample]:
        """The samples with plain arrays in some fields, fetched together; other fields stay as they are.

        Blocks the thread; on an event loop use ``aget``.

        Args:
            samples: with references, plain arrays, or both; they are not changed.
            fields: by name, where a sample has them; None: all.

        Raises:
            BackendError: none of the samples has a field; names it.
            TrainerLostError: see ``bring``.
        """
        _check_fields(samples, fields)
        self._bring(part for sample in samples for part in _parts_of_sample(sample, fields))
        return [_sample_with_values(sample, fields) for sample in samples]

    def get_completions(
        self, completions: Sequence[Completion], fields: Collection[str] | None = None
    ) -> list[Completion]:
        """The completions with plain arrays in some fields, fetched together. Blocks the thread.

        Args:
            completions: they are not changed.
            fields: ``token_ids``, ``logprobs``, ``raw_logprobs``, ``prompt_ids``, ``text``, and names of token data;
                None: all.

        Raises:
            TrainerLostError: see ``bring``.
        """
        self._bring(part for completion in completions for part in _parts_of_completion(completion, fields))
        return [_completion_with_values(completion, fields) for completion in completions]

    def get_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs or token data of a batch as plain tensors, fetched together. Blocks the thread.

        Raises:
            TrainerLostError: see ``bring``.
        """
        self._bring(array for tensor in tensors.values() for array in _sequences(tensor))
        return {name: _tensor(tensor) for name, tensor in tensors.items()}

    async def aget(self, samples: Sequence[Sample], fields: Collection[str] | None = None) -> list[Sample]:
        """``get``, without blocking the event loop."""
        parts = (part for sample in samples for part in _parts_of_sample(sample, fields))
        return await _apart(parts, lambda: self.get(samples, fields))

    async def aget_completions(
        self, completions: Sequence[Completion], fields: Collection[str] | None = None
    ) -> list[Completion]:
        """``get_completions``, without blocking the event loop."""
        parts = (part for completion in completions for part in _parts_of_completion(completion, fields))
        return await _apart(parts, lambda: self.get_completions(completions, fields))

    def _bring(self, parts: Iterable[Any]) -> None:
        blocks = {id(block): block for part in parts for block in _blocks(part)}
        if blocks:
            self.bring(list(blocks.values()))


class PlainData(DataStore):
    """Of a runtime in one process: every array is plain, so there is nothing to bring."""

    def bring(self, blocks: Sequence[Block]) -> None:
        """See ``DataStore``."""
        raise AssertionError("a runtime in one process makes no references")


async def _apart(parts: Iterable[Any], get: Callable[[], T]) -> T:
    """``get`` in a thread, where it has anything to fetch."""
    is_stored = any(_blocks(part) for part in parts)
    return await asyncio.to_thread(get) if is_stored else get()


def _blocks(part: Any) -> list[Block]:
    if isinstance(part, TextRef):
        return [part.rows.block]
    return part.blocks if isinstance(part, ArrayRef) else []


def _wants(fields: Collection[str] | None, name: str) -> bool:
    return fields is None or name in fields


def _value(part: Any) -> Any:
    return part.values() if isinstance(part, TextRef) else values_of(part)


def _values(arrays: Mapping[str, Any], fields: Collection[str] | None) -> dict[str, Any]:
    return {name: _value(array) if _wants(fields, name) else array for name, array in arrays.items()}


# Samples


def _check_fields(samples: Sequence[Sample], fields: Collection[str] | None) -> None:
    if not samples or not fields:
        return
    known = {*_SEQUENCE, TEXT}.union(*(sample.token_data for sample in samples))
    if unknown := sorted(set(fields) - known):
        raise BackendError(
            f"none of {len(samples)} samples (first: {samples[0].id!r}) has the field {unknown[0]!r}, which was asked "
            f"for; there are {', '.join(sorted(known))}"
        )


def _parts_of_sample(sample: Sample, fields: Collection[str] | None) -> Iterator[Any]:
    arrays = {"token_ids": sample.token_ids, "loss_mask": sample.loss_mask} | sample.token_data
    yield from (array for name, array in arrays.items() if _wants(fields, name))
    if _wants(fields, TEXT):
        yield from (turn.text for turn in sample.turns)


def _sample_with_values(sample: Sample, fields: Collection[str] | None) -> Sample:
    own = _values({"token_ids": sample.token_ids, "loss_mask": sample.loss_mask}, fields)
    turns = tuple(_turn_with_text(turn) for turn in sample.turns) if _wants(fields, TEXT) else sample.turns
    return replace(sample, **own, turns=turns, token_data=_values(sample.token_data, fields))


def _turn_with_text(turn: Turn) -> Turn:
    text: Any = turn.text
    return replace(turn, text=text.values()) if isinstance(text, TextRef) else turn


# Completions


def _parts_of_completion(completion: Completion, fields: Collection[str] | None) -> Iterator[Any]:
    for name in (*_COMPLETION, TEXT):
        if _wants(fields, name):
            yield getattr(completion, name)
    for data in (completion.token_data, completion.prompt_token_data):
        yield from (array for name, array in data.items() if _wants(fields, name))


def _completion_with_values(completion: Completion, fields: Collection[str] | None) -> Completion:
    changed: dict[str, Any] = {
        name: _value(value)
        for name in (*_COMPLETION, TEXT)
        if _wants(fields, name) and isinstance(value := getattr(completion, name), ArrayRef | TextRef)
    }
    return replace(
        completion,
        **changed,
        token_data=_values(completion.token_data, fields),
        prompt_token_data=_values(completion.prompt_token_data, fields),
    )


# Tensors


def _sequences(tensor: Tensor) -> list[Any]:
    return list(tensor.sequences) if isinstance(tensor, TensorRef) else []


def _tensor(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, TensorRef):
        return tensor
    return cast(Tensor, torch.from_numpy(np.concatenate([values_of(array) for array in tensor.sequences])))
