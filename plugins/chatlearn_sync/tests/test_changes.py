from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_sync.changes import apply, as_bits, changes, tensor_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]


def stored_bytes(parts):
    return sum(part.nbytes for part in parts.values())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 300), st.floats(0, 1), st.integers(0, 2**31 - 1))
def test_the_new_tensor_comes_out_bit_for_bit(dtype, elements, share, seed):
    generator = torch.Generator().manual_seed(seed)
    old = torch.randint(-100, 100, (elements,), generator=generator).to(dtype)
    moved = torch.rand(elements, generator=generator) < share
    new = torch.where(moved, (old + 1).to(dtype), old)
    parts = changes("w", old, new)
    assert stored_bytes(parts) <= new.nbytes, "never more than the tensor itself"
    assert not parts or all(tensor_of(name) == "w" for name in parts)
    target = old.clone()
    if parts:
        apply("w", parts, target)
    assert torch.equal(as_bits(target), as_bits(new))
    assert bool(parts) == (not torch.equal(as_bits(old), as_bits(new)))


def test_bits_count_and_not_values():
    old = torch.tensor([0.0, float("nan"), 1.0] + [1.0] * 100)
    new = torch.tensor([-0.0, float("nan"), 1.0] + [1.0] * 100)
    parts = changes("w", old, new)
    assert parts["w#indices"].tolist() == [0], "-0.0 is a change, the same NaN is none"
    target = old.clone()
    apply("w", parts, target)
    assert torch.signbit(target[0])
    assert torch.isnan(target[1])


@pytest.mark.parametrize(
    ("changed", "form", "size"),
    [
        (10, {"w#indices", "w#values"}, 10 * (4 + 2)),
        (200, {"w#mask", "w#values"}, 3200 // 8 + 200 * 2),
        (3100, {"w"}, 3200 * 2),
    ],
)
def test_the_smallest_form_is_taken(changed, form, size):
    old = torch.zeros(3200, dtype=torch.bfloat16)
    new = old.clone()
    new[:changed] = 1.0
    parts = changes("w", old, new)
    assert parts.keys() == form
    assert stored_bytes(parts) == size


def test_parts_that_do_not_fit_are_refused():
    parts = {"w#indices": torch.tensor([0, 1], dtype=torch.int32), "w#values": as_bits(torch.ones(1))}
    with pytest.raises(WeightSyncError, match="'w': 1 values for 2 positions"):
        apply("w", parts, torch.ones(3))
    with pytest.raises(WeightSyncError, match="its shape or dtype differs from the previous version's"):
        apply("w", {"w": torch.ones(2)}, torch.ones(3))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 1.0])
def test_tensors_are_compared_piece_by_piece(monkeypatch, share):
    """Pieces of 16 elements, of which the last is not full: the same parts as in one piece."""
    generator = torch.Generator().manual_seed(3)
    old = torch.randn(3, 335, generator=generator)
    new = torch.where(torch.rand(old.shape, generator=generator) < share, old + 1, old)
    at_once = changes("w", old, new)
    monkeypatch.setattr("chatlearn_sync.changes.PIECE", 16)
    in_pieces = changes("w", old, new)
    assert at_once.keys() == in_pieces.keys()
    assert all(torch.equal(at_once[name], in_pieces[name]) for name in at_once)
    target = old.clone()
    if in_pieces:
        apply("w", in_pieces, target)
    assert torch.equal(target, new)
