"""A checksum that costs less than copying."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BYTES = 8


def checksum(block: Tensor) -> int:
    """Sum of the 8-byte words of a one-dimensional uint8 tensor, modulo 2**64, any rest byte by byte.

    One word that changed, by a single bit or altogether, always changes it. It runs at the speed at which memory is
    read (a CRC is several times slower); what it misses is words that swapped places, which no memory or wire does.
    """
    whole = block.numel() // WORD_BYTES * WORD_BYTES
    words = int(block[:whole].view(torch.int64).sum()) if whole else 0
    rest = int(block[whole:].sum()) if whole < block.numel() else 0
    return (words + rest) % (1 << 64)
