"""What observers get: the same values, and no way from them to what is trained on."""

from __future__ import annotations

import contextlib
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from chatlearn_core.types import (
    RAW_BASIS,
    Completion,
    Prompt,
    RewardResult,
    Sample,
    SamplingParams,
    VersionSpan,
    sample_from_completion,
)
from chatlearn_core.types.array_ref import ArrayRef, values_of
from chatlearn_core.types.read_only import read_only, read_only_samples


def make_sample(index: int, prompt: Prompt) -> Sample:
    completion = Completion(
        f"s{index}",
        np.arange(3),
        np.full(3, -1.0, np.float32),
        RAW_BASIS,
        "stop",
        SamplingParams(4),
        (VersionSpan(0, 3, 1),),
        np.full(3, -2.0, np.float32),
        "abc",
        token_data={"experts": np.zeros((3, 2), np.int8)},
    )
    sample = sample_from_completion(f"s{index}", "g", prompt, completion)
    sample.reward = RewardResult(1.0, {"math": 1.0}, np.ones(3, np.float32), step_ends=np.arange(3))
    sample.sequence_data["advantage"] = 0.5
    return sample


def make_prompt() -> Prompt:
    messages = ({"role": "user", "content": "?"},)
    return Prompt("p", np.array([5, 6]), "?", "sums", ["1", {"or": [2]}], messages, {"extra_info": {"split": "train"}})


def described(value: Any) -> Any:
    """Everything in a value, as plain data."""
    if isinstance(value, dict):
        return {name: described(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [described(entry) for entry in value]
    if isinstance(value, np.ndarray | ArrayRef):
        return (str(value.dtype), np.asarray(value).tolist())
    fields = getattr(value, "__dataclass_fields__", None)
    return value if fields is None else {name: described(getattr(value, name)) for name in fields}


def vandalise(value: Any) -> None:
    """Change whatever can be changed, from the leaves up."""
    if isinstance(value, np.ndarray):
        with pytest.raises(ValueError, match="read-only"):
            value.fill(7)
    elif isinstance(value, dict | list):
        for entry in list(value.values() if isinstance(value, dict) else value):
            vandalise(entry)
        value.clear()
    elif isinstance(value, tuple):
        for entry in value:
            vandalise(entry)
    elif (fields := getattr(value, "__dataclass_fields__", None)) is not None:
        for name in fields:
            vandalise(getattr(value, name))
            with contextlib.suppress(FrozenInstanceError):
                setattr(value, name, None)


def test_copies_say_the_same_and_lead_nowhere() -> None:
    prompt = make_prompt()
    samples = [make_sample(0, prompt), make_sample(1, prompt)]
    before = [described(sample) for sample in samples]
    copies = read_only_samples(samples)
    assert [described(sample) for sample in copies] == before
    copies[0].exclusion = "gone"
    for sample in copies:
        vandalise(sample)
    assert [described(sample) for sample in samples] == before


def test_arrays_are_shared_not_copied() -> None:
    [sample] = read_only_samples([original := make_sample(0, make_prompt())])
    assert np.shares_memory(sample.token_ids, original.token_ids)
    assert np.shares_memory(sample.token_data["experts"], original.token_data["experts"])


@pytest.mark.parametrize(
    "array",
    [np.arange(6).reshape(2, 3)[:, ::2], np.array([True]), np.zeros(0, np.float32), np.array([None]), np.zeros((0, 2))],
    ids=["strided", "bool", "empty", "object", "no rows"],
)
def test_every_array_can_be_frozen(array: Any) -> None:
    frozen = read_only(array)
    assert (frozen.shape, frozen.dtype, frozen.tolist()) == (array.shape, array.dtype, array.tolist())
    assert not frozen.flags.writeable
    assert array.flags.writeable


def test_arrays_kept_elsewhere_stay_there() -> None:
    stored = ArrayRef([np.zeros(2), np.ones(1)], (), np.float64)
    frozen = read_only(stored)
    assert isinstance(frozen, ArrayRef)
    with pytest.raises(ValueError, match="read-only"):
        frozen.pieces[0][0] = 3.0
    assert values_of(stored).tolist() == [0.0, 0.0, 1.0]


def test_data_that_cannot_be_walked_is_copied_as_deeply_as_it_allows() -> None:
    class Truth:
        def __init__(self) -> None:
            self.accepted = ["1"]

    prompt = Prompt("p", np.array([5, 6]), "?", ground_truth=Truth())
    [sample] = read_only_samples([make_sample(0, prompt)])
    sample.prompt.ground_truth.accepted.append("2")
    assert prompt.ground_truth.accepted == ["1"]
