from __future__ import annotations

import math

import pytest
import torch

from chatlearn_losses.ratio import (
    MAX_LOG_RATIO,
    importance_ratio,
    masked_log_ratio,
    sequence_log_ratio,
    straight_through_ratio,
)

MASK = torch.tensor([False, True, True, False, True])
INDEX = torch.tensor([0, 0, 0, 1, 1])


def test_ratio_of_masked_tokens_only():
    new = torch.tensor([-9.0, -1.0, -2.0, -9.0, -0.5])
    old = torch.tensor([-1.0, -1.5, -1.0, -2.0, -0.5])
    expected = [1.0, math.exp(0.5), math.exp(-1.0), 1.0, 1.0]
    assert importance_ratio(new, old, MASK).tolist() == pytest.approx(expected)


def test_garbage_outside_the_mask_reaches_nothing():
    new = torch.tensor([-torch.inf, -1.0, -2.0, torch.nan, -0.5], requires_grad=True)
    old = torch.tensor([-torch.inf, -1.0, -1.0, 0.0, -0.5])
    ratio = importance_ratio(new, old, MASK)
    ratio.sum().backward()
    assert ratio.tolist() == pytest.approx([1.0, 1.0, math.exp(-1.0), 1.0, 1.0])
    assert new.grad.tolist() == pytest.approx([0.0, 1.0, math.exp(-1.0), 0.0, 1.0])


def test_clamped():
    ratio = masked_log_ratio(torch.tensor([-1.0, -900.0]), torch.tensor([-900.0, -1.0]), torch.tensor([True, True]))
    assert ratio.tolist() == [MAX_LOG_RATIO, -MAX_LOG_RATIO]


@pytest.mark.parametrize(("mean", "expected"), [(False, [0.6, -0.4]), (True, [0.3, -0.4])])
def test_sequence_level(mean, expected):
    values = torch.tensor([7.0, 0.4, 0.2, 7.0, -0.4])
    result = sequence_log_ratio(values, MASK, INDEX, 2, mean=mean)
    assert result.tolist() == pytest.approx([expected[0]] * 3 + [expected[1]] * 2)


def test_sequence_without_masked_tokens_is_zero():
    result = sequence_log_ratio(torch.ones(2), torch.tensor([False, False]), torch.tensor([0, 0]), 1, mean=True)
    assert result.tolist() == [0.0, 0.0]


def test_sequence_ratio_has_the_gradient_of_every_token():
    values = torch.tensor([0.0, 0.4, 0.2, 0.0, -0.4], requires_grad=True)
    sequence_log_ratio(values, MASK, INDEX, 2, mean=True)[0].backward()
    assert values.grad.tolist() == pytest.approx([0.0, 0.5, 0.5, 0.0, 0.0])


def test_a_sequences_ratio_with_the_gradient_of_its_tokens():
    """Value s; d/dπ_t of it is s at each token, as of the sequence's own ratio summed over its tokens."""
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ratio = straight_through_ratio(torch.tensor([1.5, 1.5], dtype=torch.float64), logprobs)
    assert ratio.tolist() == [1.5, 1.5]
    ratio.sum().backward()
    assert logprobs.grad.tolist() == [1.5, 1.5]
