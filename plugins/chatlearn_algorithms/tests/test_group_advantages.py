from __future__ import annotations

import math
import statistics
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_algorithms.group_advantages import derive_group_advantages, group_advantages
from chatlearn_algorithms.scored_rewards import scored_rewards
from chatlearn_core.exceptions import FlowError
from chatlearn_core.types import RewardResult, scored_batch

EPSILON = 1e-5


def assign(samples, **settings):
    """Derive from the samples that are not excluded, and write what comes back into them."""
    admitted = [sample for sample in samples if sample.exclusion is None]
    batch = scored_batch(admitted)
    settings = {"std": "population", "drop_zero_spread": False, **settings}
    std, drop = settings["std"], settings["drop_zero_spread"]
    advantages_of = partial(group_advantages, std=std, epsilon=EPSILON)
    derived = derive_group_advantages(batch, scored_rewards(batch), advantages_of, drop_zero_spread=drop)
    rows = [values.split(batch.lengths) for values in derived.token_data.values()]
    for index, sample in enumerate(admitted):
        sample.token_data |= {name: of[index].numpy() for name, of in zip(derived.token_data, rows, strict=True)}
        sample.sequence_data |= {name: float(values[index]) for name, values in derived.sequence_data.items()}
        sample.exclusion = derived.exclusions.get(sample.id)
    return derived.metrics


@given(rewards=st.lists(st.floats(-5, 5), min_size=2, max_size=9).filter(lambda r: max(r) - min(r) > 1e-3))
@pytest.mark.parametrize(
    ("std", "spread"), [("population", statistics.pstdev), ("sample", statistics.stdev), ("none", lambda _: None)]
)
def test_equals_the_statistics_module(std, spread, rewards):
    mean, deviation = statistics.fmean(rewards), spread(rewards)
    scale = 1.0 if deviation is None else deviation + EPSILON
    expected = [(reward - mean) / scale for reward in rewards]
    assert group_advantages(np.array(rewards), std, EPSILON).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_equal_rewards_give_exact_zeros():
    # The mean of three times 0.1 is not 0.1 in floating point.
    assert group_advantages(np.array([0.1, 0.1, 0.1]), "none").tolist() == [0.0, 0.0, 0.0]


def test_written_on_the_loss_mask(make_group):
    samples = make_group("a", [1.0, 0.0, 0.0, 0.0])
    metrics = assign(samples)
    # Mean 1/4, population variance 3/16.
    deviation = math.sqrt(3 / 16) + EPSILON
    for sample, advantage in zip(samples, [0.75 / deviation] + [-0.25 / deviation] * 3, strict=True):
        values = sample.token_data["advantages"]
        assert values.dtype == np.float32
        assert values[:3].tolist() == [0, 0, 0]
        assert values[3:].tolist() == pytest.approx([advantage] * (len(values) - 3))
        assert sample.sequence_data["advantage"] == pytest.approx(advantage)
    assert {name: metric.value for name, metric in metrics.items()} == pytest.approx(
        {"reward": 0.25, "reward_std": math.sqrt(3 / 16), "reward_min": 0, "reward_max": 1, "zero_spread_groups": 0}
    )


def test_groups_do_not_mix_and_failed_samples_do_not_count(make_group):
    first = make_group("a", [1.0, None, 0.0])
    second = make_group("b", [10.0, 30.0])
    assign([*first, *second], std="none")
    assert [s.sequence_data.get("advantage") for s in first] == [0.5, None, -0.5]
    assert [s.sequence_data["advantage"] for s in second] == [-10.0, 10.0]
    assert first[1].exclusion == "reward_error"
    assert "advantages" not in first[1].token_data


def test_a_group_with_one_scored_sample_is_excluded(make_group):
    samples = make_group("a", [None, 1.0, None])
    metrics = assign(samples)
    assert [s.exclusion for s in samples] == ["reward_error", "group_too_small", "reward_error"]
    assert metrics["reward"].value == 1.0


@pytest.mark.parametrize("drop", [False, True])
def test_zero_spread_groups(make_group, drop):
    samples = [*make_group("a", [1.0, 1.0]), *make_group("b", [0.0, 1.0])]
    metrics = assign(samples, drop_zero_spread=drop)
    reason = "zero_spread_group" if drop else None
    assert [s.exclusion for s in samples] == [reason, reason, None, None]
    assert metrics["zero_spread_groups"].value == 0.5
    if not drop:
        assert samples[0].sequence_data["advantage"] == 0.0


def test_token_rewards_add_to_the_outcome(make_group):
    samples = make_group("a", [1.0, 0.0], lengths=[2, 2])
    samples[0].reward = RewardResult(1.0, token_values=np.array([0.25, 0.75], dtype=np.float32))
    assert assign(samples)["reward_max"].value == 2.0


def test_samples_without_rewards_are_an_error(make_group):
    samples = make_group("a", [1.0, 0.0])
    samples[1].reward = None
    with pytest.raises(FlowError, match=r"samples a@0#0 \.\.\. a@0#1 have no rewards.*join m\.reward\.score"):
        assign(samples)


def test_nothing_at_all():
    assert assign([]) == {}
