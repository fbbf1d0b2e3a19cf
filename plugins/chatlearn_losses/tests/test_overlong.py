from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_losses import overlong_penalty


def test_closed_form():
    """L = 100 and B = 20: 0 up to 80, half way at 90, −1 at 100 and beyond."""
    found = overlong_penalty(torch.tensor([0, 80, 81, 90, 100, 500]), longest=100, buffer=20)
    assert found.tolist() == [0, 0, -0.05, -0.5, -1, -1]


@given(longest=st.integers(1, 500), share=st.floats(0, 1))
def test_never_rises_with_length(longest, share):
    buffer = max(1, int(share * longest))
    found = overlong_penalty(torch.arange(longest + 50), longest=longest, buffer=buffer)
    assert (found.diff() <= 0).all()
    assert found[0] == 0
    assert found[-1] == -1
