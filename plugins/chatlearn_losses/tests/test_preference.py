"""By closed forms and finite differences in float64."""

from __future__ import annotations

import math

import pytest
import torch

from chatlearn_losses import (
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kto_loss,
    log_odds,
    sequence_means,
    sequence_sums,
    simpo_loss,
)

D = torch.tensor([-1.7, -0.2, 0.0, 0.4, 2.3], dtype=torch.float64)
LABELS = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (dpo_loss(D, 0.2), lambda d: -0.8 * math.log(sigmoid(d)) - 0.2 * math.log(sigmoid(-d))),
        (ipo_loss(D, 0.25), lambda d: (d - 2.0) ** 2),
        (simpo_loss(D, 0.5), lambda d: -math.log(sigmoid(d - 0.5))),
        (bradley_terry_loss(D, 0.3), lambda d: -math.log(sigmoid(d - 0.3))),
        (log_odds(-D.abs() - 0.1), lambda d: math.log(math.exp(-abs(d) - 0.1) / (1 - math.exp(-abs(d) - 0.1)))),
    ],
    ids=["dpo", "ipo", "simpo", "bradley-terry", "log-odds"],
)
def test_formulas(found, expected):
    assert found.tolist() == pytest.approx([expected(d) for d in D.tolist()], abs=1e-12)


def test_kto_by_hand():
    found = kto_loss(D, 0.3, LABELS, desirable=1.5, undesirable=0.5)
    expected = [
        1.5 * (1 - sigmoid(d - 0.3)) if label else 0.5 * (1 - sigmoid(0.3 - d))
        for d, label in zip(D.tolist(), LABELS.tolist(), strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "loss",
    [
        lambda d: dpo_loss(d, 0.1),
        lambda d: ipo_loss(d, 0.1),
        lambda d: simpo_loss(d, 1.0),
        lambda d: bradley_terry_loss(d, 1.0),
        lambda d: log_odds(-d.abs() - 0.1),
        lambda d: kto_loss(d, 0.2, LABELS, 1.5, 0.5),
    ],
)
def test_gradients_by_finite_differences(loss):
    assert torch.autograd.gradcheck(loss, (D.clone().requires_grad_(),))


def test_at_zero_difference_the_losses_are_log_two():
    zero = torch.zeros(1, dtype=torch.float64)
    for loss in (dpo_loss(zero), dpo_loss(zero, 0.3), simpo_loss(zero, 0.0), bradley_terry_loss(zero)):
        assert loss.item() == pytest.approx(math.log(2))


def test_extreme_differences_stay_finite():
    far = torch.tensor([-1e4, 1e4], dtype=torch.float32, requires_grad=True)
    for loss in (dpo_loss(far, 0.1), simpo_loss(far, 1.0), kto_loss(far, 0.0, torch.tensor([1.0, 0.0]))):
        (gradient,) = torch.autograd.grad(loss.sum(), far)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(gradient).all()


def test_odds_of_certainty_are_bounded():
    sure = torch.zeros(1, requires_grad=True)
    odds = log_odds(sure)
    (gradient,) = torch.autograd.grad(odds.sum(), sure)
    assert odds.item() == pytest.approx(math.log(1e6), rel=1e-3)
    assert gradient.item() == 0.0


def test_sums_and_means_pass_masked_entries_by():
    values = torch.tensor([math.inf, 1.0, 2.0, math.nan, 4.0], requires_grad=True)
    mask = torch.tensor([False, True, True, False, True])
    index = torch.tensor([0, 0, 0, 1, 1])
    sums, means = (reduce(values, mask, index, 3) for reduce in (sequence_sums, sequence_means))
    assert sums.tolist() == [3.0, 4.0, 0.0]
    assert means.tolist() == [1.5, 4.0, 0.0]
    (gradient,) = torch.autograd.grad((sums + means).sum(), values)
    assert gradient.tolist() == [0.0, 1.5, 1.5, 0.0, 2.0]
