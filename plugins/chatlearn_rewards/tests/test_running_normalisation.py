"""Running normalisation against NumPy over the whole stream, and its state through a checkpoint."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatlearn_core.exceptions import CheckpointError
from chatlearn_core.types import Prompt, RewardResult, Sample
from chatlearn_rewards.normalisation_options import NormalisationOptions
from chatlearn_rewards.running_normalisation import Moments, RunningNormalisation

EPSILON = 1e-8


def step(values: list[float | None], sources: list[str] | None = None, **more: Any) -> list[Sample]:
    samples = []
    for index, value in enumerate(values):
        prompt = Prompt("p", np.array([1]), "?", data_source="a" if sources is None else sources[index])
        ids = np.arange(3)
        sample = Sample(f"s{index}", "g", prompt, ids, ids > 0, num_prompt_tokens=1)
        sample.reward = RewardResult(None, error="no") if value is None else RewardResult(value, {"c": 1.0}, **more)
        samples.append(sample)
    return samples


def values_of(found: Any) -> list[float]:
    return [reward.value for reward in found.values()]


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), max_size=8), st.floats(-1e6, 1e6))
def test_moments_are_those_of_the_whole_stream(steps: list[list[float]], offset: float) -> None:
    """Also far from 0, where a sum of squares less the squared mean would have no digit left."""
    moments, stream = Moments(), []
    for values in steps:
        shifted = [value + offset for value in values]
        stream += shifted
        moments = moments.with_values(shifted)
    assert moments.count == len(stream)
    if stream:
        scale = max(1.0, float(np.max(np.abs(stream))))
        assert moments.mean == pytest.approx(np.mean(stream), abs=1e-12 * scale)
        assert moments.std == pytest.approx(np.std(stream), rel=1e-6, abs=1e-9 * scale)


def test_a_reward_has_the_moments_of_all_up_to_its_step() -> None:
    rng, normalise, stream = np.random.default_rng(1), RunningNormalisation(NormalisationOptions()), []
    for size in (1, 3, 8, 2):
        values = rng.normal(3, 2, size).tolist()
        stream += values
        found = normalise.rewards(step(values))
        if len(stream) > 1:
            expected = (np.array(values) - np.mean(stream)) / (np.std(stream) + EPSILON)
            np.testing.assert_allclose(values_of(found), expected, rtol=1e-9)
        assert [reward.components for reward in found.values()] == [{"c": 1.0, "as_scored": value} for value in values]


def test_data_sources_and_clip_and_centre() -> None:
    options = NormalisationOptions(per_data_source=True, clip=1.0, centre=False)
    normalise = RunningNormalisation(options)
    found = values_of(normalise.rewards(step([1.0, 3.0, 100.0, 300.0, 0.0], ["a", "a", "b", "b", "c"])))
    assert found == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.0]), "1 / 1 and 3 / 1, cut to 1; 100 / 100 and 300 / 100"
    whole = RunningNormalisation(NormalisationOptions(per_data_source=True))
    found = values_of(whole.rewards(step([1.0, 3.0, 100.0, 300.0], ["a", "a", "b", "b"])))
    assert found == pytest.approx([-1.0, 1.0, -1.0, 1.0])


def test_equal_rewards_are_zero_and_failed_ones_are_left_out() -> None:
    normalise = RunningNormalisation(NormalisationOptions())
    for _ in range(3):
        found = normalise.rewards(step([0.1, None, 0.1, 0.1]))
        assert list(found) == ["s0", "s2", "s3"]
        assert values_of(found) == pytest.approx([0.0] * 3, abs=1e-6)


def test_rewards_of_tokens_and_steps_are_divided_only() -> None:
    normalise = RunningNormalisation(NormalisationOptions())
    more = {"token_values": np.array([0.5, 0.0], np.float32), "step_ends": np.array([0, 1])}
    [kept] = normalise.rewards(step([0.0], **more)).values()
    np.testing.assert_array_equal(kept.token_values, [0.5, 0.0])
    [divided] = normalise.rewards(step([4.0], **more)).values()  # 0 and 4: mean 2, standard deviation 2
    assert divided.value == pytest.approx(1.0)
    np.testing.assert_allclose(divided.token_values, [0.25, 0.0])
    assert divided.step_ends.tolist() == [0, 1]


def test_state_comes_bit_identically_through_json() -> None:
    rng = np.random.default_rng(2)
    batches = [rng.normal(1e3, 1e-3, 7).tolist() for _ in range(6)]
    whole, first = (RunningNormalisation(NormalisationOptions(per_data_source=True)) for _ in range(2))
    for values in batches[:3]:
        whole.rewards(step(values))
        first.rewards(step(values))
    resumed = RunningNormalisation(NormalisationOptions(per_data_source=True))
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for values in batches[3:]:
        assert values_of(resumed.rewards(step(values))) == values_of(whole.rewards(step(values)))
    with pytest.raises(CheckpointError, match="per_data_source=true, and the option is false"):
        RunningNormalisation(NormalisationOptions()).load_state_dict(first.state_dict())
