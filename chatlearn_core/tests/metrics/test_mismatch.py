from __future__ import annotations

import math

import pytest
import torch

from chatlearn_core.metrics.mismatch import mismatch_metrics
from chatlearn_core.types import merge_metrics

TRAINER = torch.tensor([0.0, math.log(0.5), math.log(0.2), -3.0])
GENERATOR = torch.tensor([-9.0, math.log(0.4), math.log(0.35), -9.0])
MASK = torch.tensor([False, True, True, False])


def test_by_hand():
    values = {name: metric.value for name, metric in mismatch_metrics(TRAINER, GENERATOR, MASK).items()}
    first, second = math.log(0.5 / 0.4), math.log(0.2 / 0.35)
    assert values == pytest.approx(
        {
            "mismatch/prob_diff_mean": 0.125,
            "mismatch/prob_diff_max": 0.15,
            "mismatch/logprob_diff_mean": (abs(first) + abs(second)) / 2,
            "mismatch/logprob_diff_max": max(abs(first), abs(second)),
            # k3 with x = log(trainer / generator), since the generator sampled: ratio - 1 - x.
            "mismatch/kl": ((0.5 / 0.4 - 1 - first) + (0.2 / 0.35 - 1 - second)) / 2,
            "mismatch/kl_k1": -(first + second) / 2,
            "mismatch/outliers": 0.0,
            "mismatch/infinite": 0.0,
        },
        rel=1e-5,
        abs=1e-9,
    )


def test_outliers_are_ratios_beyond_two_in_either_direction():
    trainer = torch.tensor([2.01, 1.99, 0.51, 0.49, 9.0]).log()
    metrics = mismatch_metrics(trainer, torch.zeros(5), torch.tensor([True] * 4 + [False]))
    assert metrics["mismatch/outliers"].value == 0.5


def test_a_collapse_is_shown_as_large_as_it_is():
    """Tokens that the trainer finds e^40 times less likely, and one that it finds e^12 times more likely."""
    trainer, generator = torch.tensor([-40.0, -60.0, -1.0]).double(), torch.tensor([0.0, -20.0, -13.0]).double()
    metrics = mismatch_metrics(trainer, generator, torch.ones(3, dtype=torch.bool))
    assert metrics["mismatch/kl_k1"].value == pytest.approx((40 + 40 - 12) / 3)
    assert metrics["mismatch/kl"].value == pytest.approx((2 * (math.exp(-40) + 39) + math.exp(12) - 13) / 3)


@pytest.mark.parametrize("never", [-math.inf, math.nan, -1e5])
def test_tokens_without_probability_are_counted_and_leave_the_others_to_see(never):
    trainer, generator = torch.tensor([-1.0, never, -2.0]), torch.tensor([-1.5, -1.0, -2.0])
    if never == -1e5:  # in the generator: e^(1e5 - 1) is beyond any float
        trainer, generator = generator, trainer
    mask = torch.ones(3, dtype=torch.bool)
    metrics = {name: metric.value for name, metric in mismatch_metrics(trainer, generator, mask).items()}
    assert metrics["mismatch/infinite"] == metrics["mismatch/outliers"] == pytest.approx(1 / 3)
    assert metrics["mismatch/logprob_diff_mean"] == pytest.approx(0.25)
    assert math.isfinite(metrics["mismatch/kl"])
    nothing_left = mismatch_metrics(trainer[1:2], generator[1:2], mask[:1])
    assert nothing_left["mismatch/infinite"].value == 1.0
    assert "mismatch/kl" not in nothing_left


def test_parts_merge_to_the_whole():
    parts = [mismatch_metrics(TRAINER[rows], GENERATOR[rows], MASK[rows]) for rows in (slice(0, 2), slice(2, 4))]
    whole = mismatch_metrics(TRAINER, GENERATOR, MASK)
    merged = merge_metrics(*parts)
    assert merged.keys() == whole.keys()
    for name, metric in whole.items():
        assert merged[name].value == pytest.approx(metric.value)


def test_nothing_masked_says_nothing():
    assert mismatch_metrics(TRAINER, GENERATOR, torch.zeros(4, dtype=torch.bool)) == {}
