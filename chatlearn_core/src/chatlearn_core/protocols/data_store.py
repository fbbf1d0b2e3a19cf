"""Storage of per-token data, and explicit access to its values in the driver: by sample and field.

In a run with several processes, the data that generators sample and trainers compute stays with the workers. Samples
hold references to it (``ArrayRef``), which the executor and the buffer pass on and split without fetching values. In
one process samples hold plain arrays.
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
from chatlearn_core.types import ArrayRef, Block, Completion, Sample, TensorRef, TextRef, TrainBatch, Turn, values_of

T = TypeVar("T")
_SEQUENCE = ("token_ids", "loss_mask")
_COMPLETION = ("token_ids", "logprobs", "raw_logprobs", "prompt_ids")
TEXT = "text"


@runtime_checkable
class ReadsSamples(Protocol):
    """Optional part of sample filters, samplers and losses, which run in the driver: the fields whose values they read.

    Example: a filter of repeated completions has ``reads = frozenset({"token_ids"})``.
    """

    @property
    def reads(self) -> Collection[str]:
        """Fields (see ``DataStore``) that must be plain arrays when the object is called; the executor fetches them in
        one call. For a loss, the fields that ``prepare`` reads.

        Called: before the object is called; in the driver; any number of times.
        """


def fields_read_by(reader: object) -> frozenset[str]:
    """The fields that a filter, sampler or loss declares in ``reads``; empty if it declares none."""
    return frozenset(reader.reads) if isinstance(reader, ReadsSamples) else frozenset()


class DataStore(ABC):
    """Fetches the values behind references into this process. A runtime subclasses it and implements ``bring``.

    The fields of a sample are ``token_ids``, ``loss_mask``, ``text`` (of all turns), and the names of its
    ``token_data``. A stored value is freed with the last sample, completion or batch that refers to it; there is no
    other way to release it.
    """

    @abstractmethod
    def bring(self, blocks: Sequence[Block]) -> None:
        """Fetch the blocks that are not yet in this process, concurrently. Blocks the thread.

        Raises:
            TrainerLostError: the node that held a block is gone, or a block did not arrive in time; the step must be
                repeated.
        """

    def get(self, samples: Sequence[Sample], fields: Collection[str] | None = None) -> list[Sample]:
        """Copies of the samples with plain arrays in some fields, fetched together; other fields are unchanged.

        Blocks the thread; on an event loop use ``aget``.

        Args:
            samples: hold references, plain arrays, or both; they are not changed.
            fields: names to fetch in each sample that has them; None means all.
        Raises:
            BackendError: none of the samples has one of the fields; names it.
            TrainerLostError: see ``bring``.
        """
        _check_fields(samples, fields)
        self._bring(part for sample in samples for part in _parts_of_sample(sample, fields))
        return [_sample_with_values(sample, fields) for sample in samples]

    def get_completions(
        self, completions: Sequence[Completion], fields: Collection[str] | None = None
    ) -> list[Completion]:
        """Copies of the completions with plain arrays in some fields, fetched together. Blocks the thread.

        Args:
            completions: not changed.
            fields: ``token_ids``, ``logprobs``, ``raw_logprobs``, ``prompt_ids``, ``text``, and names of token data;
                None means all.

        Raises:
            TrainerLostError: see ``bring``.
        """
        self._bring(part for completion in completions for part in _parts_of_completion(completion, fields))
        return [_completion_with_values(completion, fields) for completion in completions]

    def get_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs or token data of a batch as plain tensors, fetched in one call. Blocks the thread.

        Raises:
            TrainerLostError: see ``bring``.
        """
        self._bring(array for tensor in tensors.values() for array in _sequences(tensor))
        return {name: _tensor(tensor) for name, tensor in tensors.items()}

    async def aget(self, samples: Sequence[Sample], fields: Collection[str] | None = None) -> list[Sample]:
        """``get``, without blocking the event loop."""
        parts = (part for sample in samples for part in _parts_of_sample(sample, fields))
        return await _apart(parts, lambda: self.get(samples, fields))

    async def aget_batch(self, batch: TrainBatch, fields: Collection[str]) -> TrainBatch:
        """The batch with plain tensors in some fields, fetched together; does not block the event loop.

        Args:
            batch: holds references, plain tensors, or both; it is not changed.
            fields: of ``token_ids`` and the names of token data; other fields of a batch are always plain.

        Raises:
            BackendError: the batch does not have one of the fields; names it.
            TrainerLostError: see ``bring``.
        """
        held = {"token_ids": batch.token_ids, "loss_mask": batch.loss_mask} | batch.token_data
        if batch.num_sequences and (unknown := sorted(set(fields) - held.keys() - {TEXT})):
            raise _no_field(batch.num_sequences, batch.sample_ids[0], unknown[0], {*held, TEXT})
        wanted = {name: tensor for name, tensor in held.items() if name in fields and isinstance(tensor, TensorRef)}
        if not wanted:
            return batch
        found = await asyncio.to_thread(self.get_tensors, wanted)
        return replace(
            batch,
            token_ids=found.pop("token_ids", batch.token_ids),
            loss_mask=found.pop("loss_mask", batch.loss_mask),
            token_data=batch.token_data | found,
        )

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
    """Data store of a runtime with one process: every array is plain, so nothing is ever fetched."""

    def bring(self, blocks: Sequence[Block]) -> None:
        """See ``DataStore``."""
        raise AssertionError("a runtime with one process makes no references")


async def _apart(parts: Iterable[Any], get: Callable[[], T]) -> T:
    """Run ``get`` in a thread if any part is a reference, else directly."""
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
        raise _no_field(len(samples), samples[0].id, unknown[0], known)


def _no_field(count: int, first: str, field: str, known: Collection[str]) -> BackendError:
    return BackendError(
        f"none of {count} samples (first: {first!r}) has the requested field {field!r}; "
        f"available: {', '.join(sorted(known))}"
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
