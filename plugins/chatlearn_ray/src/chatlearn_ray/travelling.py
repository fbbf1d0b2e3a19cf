"""Samples on their way to reward workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from chatlearn_core.types import (
    Prompt,
    Sample,
    StoredArray,
    StoredCompletion,
    generator_logprobs_name,
    sample_from_completion,
)
from chatlearn_core.types.pickling import pickled_by_position
from chatlearn_core.types.stored import Rows
from chatlearn_ray.blocks import Traffic, arrays_of_completion, blocks_of, fetch_blocks, fetched_completion
from chatlearn_ray.runs import RunArray


@pickled_by_position
@dataclass(slots=True, frozen=True, eq=False)
class FreshSample:
    """A sample as generation left it: its arrays follow from prompt and completion, and need not travel beside them."""

    id: str
    group_id: str
    prompt: Prompt
    completion: StoredCompletion
    exclusion: str | None

    @staticmethod
    def of(sample: Sample) -> FreshSample | None:
        """None for any other sample."""
        completion = sample.completion
        if not isinstance(completion, StoredCompletion) or sample.reward is not None or sample.sequence_data:
            return None
        logprobs = generator_logprobs_name(completion)
        same_names = sample.token_data.keys() == {logprobs, *completion.token_data}
        pairs: list[tuple[Any, Any]] = [(sample.token_ids, completion.token_ids)]
        if same_names:
            pairs.append((sample.token_data[logprobs], completion.logprobs))
            pairs += [(sample.token_data[name], values) for name, values in completion.token_data.items()]
        if not same_names or not all(_ends_with(whole, part) for whole, part in pairs):
            return None
        start = sample.num_prompt_tokens
        if sample.loss_mask[:start].any() or not sample.loss_mask[start:].all():
            return None
        return FreshSample(sample.id, sample.group_id, sample.prompt, completion, sample.exclusion)

    def sample(self) -> Sample:
        """The sample again, with ordinary arrays."""
        made = sample_from_completion(self.id, self.group_id, self.prompt, self.completion.fetch())
        made.exclusion = self.exclusion
        return made


def _ends_with(whole: Any, part: Any) -> bool:
    """Whether an array is another one behind the prompt's part: the very same stored rows."""
    stored = isinstance(whole, StoredArray) and isinstance(part, StoredArray)
    return stored and bool(whole.pieces and part.pieces) and whole.pieces[-1] is part.pieces[-1]


def travelling_samples(samples: Sequence[Sample], traffic: Traffic) -> list[Sample | FreshSample]:
    """The samples as they are sent: what they hold by reference stays one, masks and the like are told in short."""
    sent: list[Sample | FreshSample] = []
    for sample in samples:
        fresh = FreshSample.of(sample)
        if fresh is not None:
            traffic.driver_bytes += sample.prompt.token_ids.nbytes
            sent.append(fresh)
            continue
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


def fetched_samples(samples: Sequence[Sample | FreshSample]) -> list[Sample]:
    """The samples as they were before they travelled, with ordinary arrays. Blocks the thread until they are here."""
    fetch_blocks(blocks_of(array for sample in samples for array in _arrays_of_sample(sample)))
    return [sample.sample() if isinstance(sample, FreshSample) else _arrived(sample) for sample in samples]


def _arrived(sample: Sample) -> Sample:
    return replace(
        sample,
        token_ids=np.asarray(sample.token_ids),
        completion=fetched_completion(sample.completion),
        loss_mask=_whole(sample.loss_mask),
        token_data={name: _whole(values) for name, values in sample.token_data.items()},
    )


def _arrays_of_sample(sample: Sample | FreshSample) -> list[Any]:
    if isinstance(sample, FreshSample):
        return arrays_of_completion(sample.completion)
    completion = sample.completion
    parts = arrays_of_completion(completion) if isinstance(completion, StoredCompletion) else []
    return [sample.token_ids, *sample.token_data.values(), *parts]
