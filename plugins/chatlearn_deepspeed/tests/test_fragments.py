"""Runs of flattened tensors as boxes."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.types.boxes import slices
from chatlearn_deepspeed.fragments import boxes_of_run


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), st.data())
def test_boxes_hold_the_elements_of_a_run_in_order(shape, data) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    numbered = torch.arange(prod(shape)).view(shape)
    boxes = boxes_of_run(shape, start, stop)
    found = [numbered[slices(box)].reshape(-1) for box in boxes]
    assert torch.cat([torch.arange(0), *found]).tolist() == list(range(start, stop))
    assert all(len(part) for part in found)
    assert len(boxes) <= 2 * len(shape) - 1
