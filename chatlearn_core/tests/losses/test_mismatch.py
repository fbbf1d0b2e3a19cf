from __future__ import annotations

import math

import pytest
import torch

from chatlearn_core.losses.mismatch import mismatch_metrics
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
        },
        rel=1e-5,
        abs=1e-9,
    )


def test_outliers_are_ratios_beyond_two_in_either_direction():
    trainer = torch.tensor([2.01, 1.99, 0.51, 0.49, 9.0]).log()
    metrics = mismatch_metrics(trainer, torch.zeros(5), torch.tensor([True] * 4 + [False]))
    assert metrics["mismatch/outliers"].value == 0.5


def test_parts_merge_to_the_whole():
    parts = [mismatch_metrics(TRAINER[rows], GENERATOR[rows], MASK[rows]) for rows in (slice(0, 2), slice(2, 4))]
    whole = mismatch_metrics(TRAINER, GENERATOR, MASK)
    merged = merge_metrics(*parts)
    assert merged.keys() == whole.keys()
    for name, metric in whole.items():
        assert merged[name].value == pytest.approx(metric.value)


def test_nothing_masked_says_nothing():
    assert mismatch_metrics(TRAINER, GENERATOR, torch.zeros(4, dtype=torch.bool)) == {}
