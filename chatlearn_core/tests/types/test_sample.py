"""A sample is a prompt and its completion with everything aligned."""

from __future__ import annotations

import numpy as np
import pytest

from chatlearn_core.types import (
    NOT_SAMPLED,
    RAW_BASIS,
    Completion,
    ExampleDraw,
    Media,
    Prompt,
    RewardResult,
    SamplingParams,
    VersionSpan,
    pack_samples,
    policy_versions,
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
        (VersionSpan(0, 1, 4), VersionSpan(1, 2, 5)),
        text="yes",
        token_data={"experts": np.array([[1, 2], [3, 4]])},
    )
    sample = sample_from_completion("p@1#0", "p@1", prompt, completion)
    assert sample.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert sample.loss_mask.tolist() == [False, False, False, True, True]
    assert sample.token_data["generator_logprobs"].tolist() == [0.0, 0.0, 0.0, -0.5, -1.5]
    assert sample.token_data["experts"].tolist() == [[0, 0], [0, 0], [0, 0], [1, 2], [3, 4]]
    assert sample.token_data["policy_version"].tolist() == [-1, -1, -1, 4, 5]
    assert (sample.num_prompt_tokens, sample.num_completion_tokens, sample.completion_ids.tolist()) == (3, 2, [8, 9])
    assert (sample.unit_id, sample.example_id, sample.exclusion) == ("p@1#0", "p", None)
    [turn] = sample.turns
    assert (turn.start, turn.stop, turn.finish_reason, turn.request_id) == (3, 5, "stop", "r")
    assert (sample.text, sample.last_turn) == ("yes", turn)


def test_a_prompt_is_as_long_as_the_engine_saw_it() -> None:
    """An engine puts as many tokens in an image's place as the image takes, and says something of each."""
    image = Media("image", b"...")
    prompt = Prompt("p", np.array([5, 99, 7]), "?", media=(image,))
    completion = Completion(
        "r",
        np.array([8]),
        np.array([-0.5], np.float32),
        RAW_BASIS,
        "stop",
        SamplingParams(4),
        (VersionSpan(0, 1, 2),),
        token_data={"experts": np.array([[3, 4]])},
        prompt_ids=np.array([5, 99, 99, 99, 7]),
        prompt_token_data={"experts": np.arange(10).reshape(5, 2)},
    )
    sample = sample_from_completion("p@0#0", "p@0", prompt, completion)
    assert sample.token_ids.tolist() == [5, 99, 99, 99, 7, 8]
    assert sample.num_prompt_tokens == sample.turns[0].start == 5
    assert sample.token_data["experts"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [3, 4]]
    assert sample.media == (image,)
    assert pack_samples([sample]).num_prompt_tokens.tolist() == [5]


def test_raw_logprobs_stand_beside_those_of_the_distribution_that_was_sampled_from() -> None:
    tempered, raw = np.array([-0.5], np.float32), np.array([-2.0], np.float32)
    for sampling, expected in (
        (SamplingParams(4, temperature=0.5), {"generator_logprobs": tempered, "generator_raw_logprobs": raw}),
        (SamplingParams(4), {"generator_logprobs": tempered}),  # at temperature 1 both are the same
    ):
        completion = Completion("r", np.array([8]), tempered, sampling.basis, "stop", sampling, (), raw)
        sample = sample_from_completion("s", "g", Prompt("p", np.array([5]), "?"), completion)
        found = {name: values[1:].tolist() for name, values in sample.token_data.items() if "logprobs" in name}
        assert found == {name: values.tolist() for name, values in expected.items()}


def test_versions_of_several_spans_are_told_by_token() -> None:
    spans = (VersionSpan(0, 2, 6), VersionSpan(2, 3, 7))
    assert policy_versions(1, spans, 5).tolist() == [NOT_SAMPLED, 6, 6, 7, NOT_SAMPLED]


def test_ids_of_a_draw_do_not_hold_the_step() -> None:
    draw = ExampleDraw(Prompt("gsm8k/7", np.array([5]), "?"), 1, "gsm8k/7~2@9")
    assert (draw.group_id, draw.sample_id(3), draw.sample_key(3)) == ("gsm8k/7@1", "gsm8k/7@1#3", "gsm8k/7~2@9#3")


@pytest.mark.parametrize(("value", "error"), [(None, None), (1.0, "failed")])
def test_a_reward_has_either_a_value_or_an_error(value: float | None, error: str | None) -> None:
    with pytest.raises(AssertionError):
        RewardResult(value, error=error)
