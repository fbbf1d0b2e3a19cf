from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_losses.clip import clipped_policy_loss, clipped_weight_loss


def loop_loss(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    clipped = min(max(ratio, 1 - low), 1 + high)
    loss = max(-advantage * ratio, -advantage * clipped)
    return min(loss, -advantage * dual) if dual is not None and advantage < 0 else loss


@given(
    ratio=st.floats(0.01, 20),
    advantage=st.floats(-3, 3),
    low=st.floats(0, 0.5),
    high=st.floats(0, 0.5),
    dual=st.none() | st.floats(1.5, 5),
)
def test_equals_the_formula(ratio, advantage, low, high, dual):
    result = clipped_policy_loss(
        torch.tensor([ratio], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        clip_low=low,
        clip_high=high,
        dual_clip=dual,
    )
    assert result.per_token.item() == pytest.approx(loop_loss(ratio, advantage, low, high, dual), abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope", "clipped", "dual_clipped"),
    [
        (1.1, 1.0, -1.0, False, False),
        (1.4, 1.0, 0.0, True, False),  # above 1 + 0.28, rising further is not rewarded
        (1.25, 1.0, -1.0, False, False),  # inside the higher upper bound
        (0.5, 1.0, -1.0, False, False),  # below the range but the advantage pulls it back
        (0.7, -2.0, 0.0, True, False),
        (1.4, -2.0, 2.0, False, False),
        (3.5, -2.0, 0.0, False, True),  # -A * rho = 7 > -A * c = 6
    ],
)
def test_where_the_gradient_stops(ratio, advantage, slope, clipped, dual_clipped):
    leaf = torch.tensor([ratio], requires_grad=True)
    result = clipped_policy_loss(leaf, torch.tensor([advantage]), clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    result.per_token.sum().backward()
    assert leaf.grad.item() == slope
    assert (result.clipped.item(), result.dual_clipped.item()) == (clipped, dual_clipped)


def test_dual_clip_caps_the_loss():
    result = clipped_policy_loss(torch.tensor([3.5]), torch.tensor([-2.0]), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert result.per_token.item() == pytest.approx(6.0)


@given(
    ratio=st.floats(0.01, 20),
    advantage=st.floats(-3, 3),
    logprob=st.floats(-9, 0),
    low=st.floats(0, 1),
    high=st.floats(0, 4),
)
def test_clipped_weights_lose_no_gradient(ratio, advantage, logprob, low, high):
    leaf = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    tensors = (torch.tensor([of], dtype=torch.float64) for of in (ratio, advantage))
    result = clipped_weight_loss(leaf, *tensors, clip_low=low, clip_high=high)
    weight = min(max(ratio, 1 - low), 1 + high)
    assert result.per_token.item() == pytest.approx(-weight * advantage * logprob, abs=1e-12)
    result.per_token.sum().backward()
    assert leaf.grad.item() == pytest.approx(-weight * advantage, abs=1e-12)
    assert result.clipped.item() == (weight != ratio)
