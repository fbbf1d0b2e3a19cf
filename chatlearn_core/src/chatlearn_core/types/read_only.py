"""Copies for observers: changing them never changes the data that is trained on.

A sample's attributes and mappings are copied; its arrays are shared as read-only views.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from chatlearn_core.types.array_ref import ArrayRef
from chatlearn_core.types.prompt import Media, Prompt
from chatlearn_core.types.sample import RewardResult, Sample

_CONSTANTS = (str, int, float, bool, bytes, type(None))


def read_only_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Copies of samples, including their prompts; samples of one prompt share one copy of it."""
    prompts: dict[int, Prompt] = {}
    copies: list[Sample] = []
    for sample in samples:
        prompt = prompts.get(id(sample.prompt))
        if prompt is None:
            prompt = prompts[id(sample.prompt)] = _prompt(sample.prompt)
        copies.append(
            replace(
                sample,
                prompt=prompt,
                token_ids=read_only(sample.token_ids),
                loss_mask=read_only(sample.loss_mask),
                reward=None if sample.reward is None else _reward(sample.reward),
                token_data=_arrays(sample.token_data),
                sequence_data=dict(sample.sequence_data),
                media=_media(sample.media),
            )
        )
    return copies


def plain_copy(value: Any) -> Any:
    """A copy of plain data: mappings, lists, numbers, texts, arrays. Anything else is deep-copied if it allows it."""
    if isinstance(value, _CONSTANTS):
        return value
    if isinstance(value, Mapping):
        return {key: plain_copy(entry) for key, entry in value.items()}
    if type(value) is list:
        return [plain_copy(entry) for entry in value]
    if type(value) is tuple:
        return tuple(plain_copy(entry) for entry in value)
    if isinstance(value, np.ndarray | ArrayRef):
        return read_only(value)
    return copy.deepcopy(value)


def read_only(array: Any) -> Any:
    """A read-only view of an array; a reference yields a read-only reference."""
    if isinstance(array, ArrayRef):
        return array.read_only()
    view = array.view()
    view.flags.writeable = False
    return view


def _arrays(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: read_only(values) for name, values in arrays.items()}


def _prompt(prompt: Prompt) -> Prompt:
    return replace(
        prompt,
        token_ids=read_only(prompt.token_ids),
        ground_truth=plain_copy(prompt.ground_truth),
        messages=plain_copy(prompt.messages),
        columns=plain_copy(prompt.columns),
        media=_media(prompt.media),
    )


def _media(media: tuple[Media, ...]) -> tuple[Media, ...]:
    return tuple(Media(one.kind, plain_copy(one.content)) for one in media)


def _reward(reward: RewardResult) -> RewardResult:
    tokens = reward.token_values
    return RewardResult(
        reward.value,
        dict(reward.components),
        None if tokens is None else read_only(tokens),
        reward.error,
        reward.answer,
        None if reward.step_ends is None else read_only(reward.step_ends),
    )
