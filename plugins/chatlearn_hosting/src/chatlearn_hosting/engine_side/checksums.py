"""A checksum of a tensor that costs less than copying it. Needs torch and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

WORD_BYTES = 8


class CorruptedTensorError(RuntimeError):
    """A tensor is not what its sender had."""


def checksum(tensor: torch.Tensor) -> int:
    """Sum of the 8-byte words of a contiguous tensor's bytes, modulo 2**64, any rest byte by byte.

    One word that changed, by a single bit or altogether, always changes it. It runs at the speed at which memory is
    read (a CRC is several times slower) and on the tensor's own device; what it misses is words that swapped places,
    which no memory and no wire does.
    """
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    data = tensor.reshape(-1).view(torch.uint8)
    if data.storage_offset() % WORD_BYTES:
        data = data.clone()  # a view into a larger tensor, whose words lie across ours
    whole = data.numel() // WORD_BYTES * WORD_BYTES
    words = int(data[:whole].view(torch.int64).sum()) if whole else 0
    rest = int(data[whole:].sum()) if whole < data.numel() else 0
    return (words + rest) % (1 << 64)


def require_intact(tensors: Iterable[tuple[str, torch.Tensor]], checksums: Sequence[int]) -> None:
    """Compare tensors with what the sender had, in order.

    Raises:
        CorruptedTensorError: a tensor is not what was sent; names it.
    """
    for (name, tensor), expected in zip(tensors, checksums, strict=True):
        found = checksum(tensor)
        if found != expected:
            raise CorruptedTensorError(
                f"tensor {name!r} is corrupted: its checksum is {found:#x}, the sender has {expected:#x}"
            )
