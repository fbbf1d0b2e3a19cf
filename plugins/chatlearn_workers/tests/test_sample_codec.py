"""What a reward worker gets is what the driver has, and nothing travels that follows from something else."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from chatlearn_core.types import (
    RAW_BASIS,
    ArrayRef,
    Completion,
    Prompt,
    RewardResult,
    Rows,
    Sample,
    SamplingParams,
    Turn,
    sample_from_completion,
)
from chatlearn_workers.blocks import BlockStore, Traffic
from chatlearn_workers.sample_codec import travelling_samples

PROMPT = Prompt("p", np.arange(5), "?", ground_truth="4")


class Block:
    """Stands for a block in the object store; it travels with the message, which Ray's does not."""

    def __init__(self, length: int) -> None:
        self.arrays: dict[str, Any] = {
            "token_ids": np.arange(length),
            "logprobs": -np.arange(length, dtype=np.float32),
            "experts": np.ones((length, 2), np.int8),
        }

    def rows(self, name: str, start: int, stop: int) -> Any:
        return self.arrays[name][start:stop]


def completion(length: int = 100) -> Completion:
    block = Block(length)
    arrays: dict[str, Any] = {
        name: ArrayRef([Rows(block, name, 0, length)], array.shape[1:], array.dtype)
        for name, array in block.arrays.items()
    }
    return Completion(
        request_id="a",
        token_ids=arrays["token_ids"],
        logprobs=arrays["logprobs"],
        basis=RAW_BASIS,
        finish_reason="stop",
        sampling=SamplingParams(200),
        version_spans=(),
        text="words",
        token_data={"experts": arrays["experts"]},
    )


def sample(length: int = 100, **changes: Any) -> Sample:
    return replace(sample_from_completion("a", "g", PROMPT, completion(length)), **changes)


def travel(one: Sample) -> tuple[Any, Sample, Traffic]:
    traffic = Traffic()
    [sent] = travelling_samples([one], traffic)
    [arrived] = BlockStore().get(pickle.loads(pickle.dumps([sent])))
    return sent, arrived, traffic


def assert_equal(arrived: Sample, one: Sample) -> None:
    for name in ("id", "group_id", "exclusion", "sequence_data", "reward"):
        assert getattr(arrived, name) == getattr(one, name)
    assert type(arrived.token_ids) is type(arrived.loss_mask) is np.ndarray
    assert arrived.token_ids.tolist() == one.token_ids.tolist()
    assert arrived.loss_mask.tolist() == one.loss_mask.tolist()
    assert {k: v.tolist() for k, v in arrived.token_data.items()} == {k: v.tolist() for k, v in one.token_data.items()}
    assert [type(turn) for turn in arrived.turns] == [Turn]
    assert arrived.text == "words"
    assert arrived.prompt.ground_truth == "4"


@pytest.mark.parametrize("changes", [{}, {"exclusion": "empty_completion"}])
@pytest.mark.parametrize("length", [0, 1, 100])
def test_a_fresh_sample_travels_as_prompt_and_references(changes: dict[str, Any], length: int) -> None:
    one = sample(length, **changes)
    sent, arrived, traffic = travel(one)
    assert len(pickle.dumps(sent)) - len(pickle.dumps(sample(0))) < 2_500, "what a block of this test takes included"
    assert_equal(arrived, *BlockStore().get([one]))
    assert traffic.driver_bytes == PROMPT.token_ids.nbytes


def partly_masked() -> Sample:
    one = sample()
    mask = one.loss_mask.copy()
    mask[50:60] = False
    return replace(one, loss_mask=mask)


def with_advantages() -> Sample:
    one = sample()
    return replace(one, token_data={**one.token_data, "advantages": np.where(one.loss_mask, 0.5, 0.0)})


@pytest.mark.parametrize(
    "one",
    [
        partly_masked(),
        with_advantages(),
        sample(token_ids=np.arange(105)),
        sample(sequence_data={"score": 1.0}),
        sample(reward=RewardResult(1.0)),
    ],
    ids=["mask", "token data", "token ids", "sequence data", "reward"],
)
def test_any_other_sample_travels_with_its_arrays(one: Sample) -> None:
    sent, arrived, traffic = travel(one)
    assert isinstance(sent, Sample)
    assert_equal(arrived, *BlockStore().get([one]))
    assert 0 < traffic.driver_bytes < 1_000
