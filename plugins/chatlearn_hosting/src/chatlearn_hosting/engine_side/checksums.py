"""A tensor checksum that is cheaper than a copy. Needs only torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

WORD_BYTES = 8


class CorruptedTensorError(RuntimeError):
    """A tensor differs from what its sender had."""


def checksum(tensor: torch.Tensor) -> int:
    """Sum the 8-byte words of a contiguous tensor, and the remaining bytes, modulo 2**64.

    Any change within a single word changes the sum. It runs at memory bandwidth (a CRC is several times slower) on the
    tensor's own device. It misses swapped words, an error that neither memory nor networks produce.
    """
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    data = tensor.reshape(-1).view(torch.uint8)
    if data.storage_offset() % WORD_BYTES:
        data = data.clone()  # the view is not aligned to 8-byte words
    whole = data.numel() // WORD_BYTES * WORD_BYTES
    words = int(data[:whole].view(torch.int64).sum()) if whole else 0
    rest = int(data[whole:].sum()) if whole < data.numel() else 0
    return (words + rest) % (1 << 64)


def require_intact(tensors: Iterable[tuple[str, torch.Tensor]], checksums: Sequence[int]) -> None:
    """Compare tensors with the sender's checksums, in order.

    Raises:
        CorruptedTensorError: a tensor differs; the message names it.
    """
    for (name, tensor), expected in zip(tensors, checksums, strict=True):
        found = checksum(tensor)
        if found != expected:
            raise CorruptedTensorError(
                f"tensor {name!r} is corrupted: its checksum is {found:#x}, the sender has {expected:#x}"
            )
