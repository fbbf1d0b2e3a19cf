from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_losses import clipped_value_loss

number = st.floats(-3, 3)


@given(value=number, old=number, target=number, clip=st.none() | st.floats(0.01, 1))
def test_equals_the_formula(value, old, target, clip):
    tensors = (torch.tensor([of], dtype=torch.float64) for of in (value, old, target))
    loss = clipped_value_loss(*tensors, clip=clip)
    errors = [(value - target) ** 2]
    if clip is not None:
        errors.append((min(max(value, old - clip), old + clip) - target) ** 2)
    assert loss.per_token.item() == pytest.approx(max(errors) / 2, abs=1e-12)
    assert loss.clipped.item() == (len(errors) == 2 and errors[1] > errors[0])


@pytest.mark.parametrize(
    ("value", "slope", "clipped"),
    [
        (0.9, -0.1, False),  # nearer than the clip allows: the plain error is the larger one
        (0.1, -0.9, False),  # inside the range
        (0.5, 0.0, True),  # beyond the range toward the return 1: going on is not rewarded
        (-0.5, -1.5, False),  # beyond it the other way: pulled back
    ],
)
def test_where_the_gradient_stops(value, slope, clipped):
    """V_old = 0, R = 1 and ε = 0.2, but ε = 1 in the first case."""
    leaf = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    loss = clipped_value_loss(leaf, zero, one, clip=1.0 if value == 0.9 else 0.2)
    loss.per_token.sum().backward()
    assert leaf.grad.item() == pytest.approx(slope)
    assert loss.clipped.item() == clipped
