"""A sample is a prompt and its completion with everything aligned."""

from __future__ import annotations

import numpy as np
import pytest

from chatlearn_core.types import (
    RAW_BASIS,
    Completion,
    Prompt,
    RewardResult,
    SamplingParams,
    sample_from_completion,
)


def test_completion_values_stand_behind_zeros_for_the_prompt() -> None:
    prompt = Prompt("p", np.array([5, 6, 7]), "?")
    completion = Completion(
        "r",
        np.array([8, 9]),
        np.array([-0.5, -1.5], np.float32),
        RAW_BASIS,
        "stop",
        SamplingParams(4),
        (),
        token_data={"experts": np.array([[1, 2], [3, 4]])},
    )
    sample = sample_from_completion("p@1#0", "p@1", prompt, completion)
    assert sample.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert sample.loss_mask.tolist() == [False, False, False, True, True]
    assert sample.token_data["generator_logprobs"].tolist() == [0.0, 0.0, 0.0, -0.5, -1.5]
    assert sample.token_data["experts"].tolist() == [[0, 0], [0, 0], [0, 0], [1, 2], [3, 4]]
    assert (sample.num_prompt_tokens, sample.num_completion_tokens) == (3, 2)
    assert sample.exclusion is None


@pytest.mark.parametrize(("value", "error"), [(None, None), (1.0, "failed")])
def test_a_reward_has_either_a_value_or_an_error(value: float | None, error: str | None) -> None:
    with pytest.raises(AssertionError):
        RewardResult(value, error=error)
