from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from chatlearn_algorithms.preference_options import RewardModelOptions
from chatlearn_algorithms.reward_model import RewardModel, RewardModelLoss

LOSS = RewardModelLoss(margin_coef=0.5, centring_coef=0.1)
SCORES = torch.tensor([1.3, -0.4, 0.2, 0.9, -1.1], dtype=torch.float64)


@pytest.fixture
def batch(make_preferences):
    return make_preferences([(4.0, 2), (1.0, 2)], [(0.0, 1), (2.0, 3), (1.0, 1)])


def pair(c: float, r: float, margin: float) -> float:
    return math.log1p(math.exp(-(c - r - margin))) + 0.1 * (c + r) ** 2


def test_value_by_hand(batch):
    s = SCORES.tolist()
    first = pair(s[0], s[1], 1.5)
    second = (pair(s[3], s[2], 1.0) + pair(s[3], s[4], 0.5) + pair(s[4], s[2], 0.5)) / 3
    found = LOSS({"scores": SCORES}, LOSS.prepare(batch))
    assert found.total.item() == pytest.approx((first + second) / 2, rel=1e-6)
    assert found.metrics["accuracy"].value == pytest.approx((1 + 2 / 3) / 2)


def test_gradient_by_finite_differences(batch):
    prepared = LOSS.prepare(batch)
    assert torch.autograd.gradcheck(lambda x: LOSS({"scores": x}, prepared).total, (SCORES.clone().requires_grad_(),))


def test_micro_batches_do_not_matter(batch):
    prepared = LOSS.prepare(batch)
    whole = LOSS({"scores": SCORES}, prepared).total.item()
    parts = [LOSS({"scores": SCORES[rows]}, prepared.select(rows)) for rows in ([3, 2, 4], [1, 0])]
    assert sum(part.total.item() for part in parts) == pytest.approx(whole)


def test_it_is_no_policy_and_measures_held_out_pairs(batch, make_context):
    context = replace(make_context(), roles={"trainer": "trainer"})
    algorithm = RewardModel(RewardModelOptions(margin_coef=0.5, centring_coef=0.1), context)
    assert (algorithm.policy, algorithm.evaluation_input) == (None, "ranked_completions")
    assert algorithm.loss().needs.names == {"scores"}
    batch.sequence_data["trainer_scores"] = SCORES
    metrics = algorithm.evaluation_metrics(batch)
    assert metrics["loss"].value == pytest.approx(LOSS({"scores": SCORES}, LOSS.prepare(batch)).total.item())
    assert metrics["accuracy"].value == pytest.approx((1 + 2 / 3) / 2)
