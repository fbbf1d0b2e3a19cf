from __future__ import annotations

import random

import pytest
import torch

from chatlearn_hosting.engine_side.checksums import CorruptedTensorError, checksum, require_intact


def loop_sum(tensor: torch.Tensor) -> int:
    """The definition, byte by byte."""
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    whole = len(data) // 8 * 8
    words = sum(int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, whole, 8))
    return (words + sum(data[whole:])) % 2**64


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(-2.5),
        torch.zeros(0),
        torch.randn(7, 3),
        torch.randn(13).to(torch.bfloat16),
        torch.randn(64).to(torch.bfloat16)[3:40],
        torch.tensor([2**62, 2**62, 2**62]),
    ],
)
def test_it_is_the_sum_of_the_words(tensor: torch.Tensor) -> None:
    assert checksum(tensor) == loop_sum(tensor)


def test_any_flipped_bit_changes_it() -> None:
    tensor = torch.randn(101)
    expected, bits = checksum(tensor), tensor.view(torch.uint8)
    for position in random.Random(0).sample(range(404 * 8), 200):
        bits[position // 8] ^= 1 << position % 8
        assert checksum(tensor) != expected
        bits[position // 8] ^= 1 << position % 8
    assert checksum(tensor) == expected


def test_the_tensor_that_changed_is_named() -> None:
    tensors = [("a", torch.ones(3)), ("b", torch.ones(3))]
    checksums = [checksum(tensor) for _, tensor in tensors]
    require_intact(tensors, checksums)
    tensors[1][1][0] = 2.0
    with pytest.raises(CorruptedTensorError, match=r"tensor 'b' is corrupted: its checksum is 0x\w+, the sender has"):
        require_intact(tensors, checksums)
