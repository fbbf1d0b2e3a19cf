from __future__ import annotations

import statistics

import pytest

from chatlearn_algorithms.gdpo import GDPO
from chatlearn_algorithms.grpo_options import GDPOOptions
from chatlearn_core.types import RewardResult, Sample, scored_batch

WEIGHTS = {"correct": 1.0, "format": 0.5}
VERDICTS = [[(1, 0), (0, 1), (0, 0)], [(1, 1), (1, 0)]]


@pytest.fixture
def samples(make_group) -> list[Sample]:
    groups = []
    for name, of_group in zip("ab", VERDICTS, strict=True):
        members = make_group(name, [0.0] * len(of_group))
        for sample, (correct, form) in zip(members, of_group, strict=True):
            value = WEIGHTS["correct"] * correct + WEIGHTS["format"] * form
            sample.reward = RewardResult(value, {"correct": float(correct), "format": float(form)})
        groups += members
    return groups


def loop_sums() -> list[float]:
    sums = []
    for of_group in VERDICTS:
        columns = list(zip(*of_group, strict=True))
        for row in of_group:
            total = 0.0
            for value, column, weight in zip(row, columns, WEIGHTS.values(), strict=True):
                if len(set(column)) > 1:
                    total += weight * (value - statistics.fmean(column)) / (statistics.pstdev(column) + 1e-5)
            sums.append(total)
    return sums


@pytest.mark.parametrize("over", ["sequence", "token"])
def test_each_reward_is_normalised_by_itself(make_context, samples, over):
    algorithm = GDPO(GDPOOptions(group_size=3, rewards=WEIGHTS, whiten_over=over), make_context())
    batch = scored_batch(samples)
    found = algorithm.advantages(batch, 1)
    sums = loop_sums()
    population = (
        sums
        if over == "sequence"
        else [value for value, sample in zip(sums, samples, strict=True) for _ in range(int(sample.loss_mask.sum()))]
    )
    mean, spread = statistics.fmean(population), (statistics.variance(population) + 1e-8) ** 0.5
    expected = [(value - mean) / spread for value in sums]
    rows = found.token_data["advantages"].split(batch.lengths)
    for row, sample, value in zip(rows, samples, expected, strict=True):
        assert row[3:].tolist() == pytest.approx([value] * int(sample.loss_mask.sum()), abs=1e-6)
        assert not row[:3].any()
    assert algorithm.advantage_split == "batch"
    assert found.metrics["reward/correct"].value == pytest.approx(3 / 5)


def test_different_combinations_of_equal_sum_differ(make_context, make_group):
    """GRPO gives (1, 0) and (0, 1) the same advantage where both weigh 1; here the rarer success weighs more."""
    members = make_group("a", [0.0] * 4)
    for sample, (correct, form) in zip(members, [(1, 0), (0, 1), (0, 1), (0, 0)], strict=True):
        sample.reward = RewardResult(float(correct + form), {"correct": float(correct), "format": float(form)})
    algorithm = GDPO(GDPOOptions(group_size=4, rewards={"correct": 1.0, "format": 1.0}), make_context())
    batch = scored_batch(members)
    first = algorithm.advantages(batch, 1).token_data["advantages"].split(batch.lengths)
    assert first[0][-1] > first[1][-1] > first[3][-1]


def test_groups_are_dropped_where_no_reward_differs(make_context, samples):
    for sample in samples[:3]:
        sample.reward = RewardResult(1.0, {"correct": 1.0, "format": 0.0})
    options = GDPOOptions(group_size=3, rewards=WEIGHTS, drop_zero_spread_groups=True)
    found = GDPO(options, make_context()).advantages(scored_batch(samples), 1)
    assert found.exclusions == dict.fromkeys((sample.id for sample in samples[:3]), "zero_spread_group")
    assert not found.token_data["advantages"][: sum(len(sample.token_ids) for sample in samples[:3])].any()
