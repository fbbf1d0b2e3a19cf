"""A checksum of a tensor that costs less than copying it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence

import torch
from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError

WORD_BYTES = 8
PIECE_BYTES = 1 << 20
"""Fits into the second-level cache of any processor that this is worth running on."""


def checksum(tensor: Tensor) -> int:
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


def copy_with_checksum(source: Tensor, target: Tensor) -> int:
    """Copy into a contiguous tensor of the same shape and dtype; returns the source's checksum.

    On the host piece by piece, so that a piece is summed and copied while it is in the cache.
    """
    source = source.contiguous()
    if source.nbytes <= PIECE_BYTES or source.device.type != "cpu":
        target.copy_(source)
        return checksum(source)
    flat, into = source.reshape(-1), target.reshape(-1)
    step = PIECE_BYTES // source.element_size()  # whole words, so that the sum is that of the whole
    total = 0
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        total += checksum(piece)
        into[start : start + step].copy_(piece)
    return total % (1 << 64)


def verify(tensors: Iterable[tuple[str, Tensor]], checksums: Sequence[int], where: str) -> None:
    """Compare tensors with what the sender had, in order.

    Args:
        where: leads the message.

    Raises:
        WeightSyncError: a tensor is not what was sent; names it.
    """
    for (name, tensor), expected in zip(tensors, checksums, strict=True):
        found = checksum(tensor)
        if found != expected:
            raise WeightSyncError(
                f"{where}: tensor {name!r} is corrupted: its checksum is {found:#x}, the sender has {expected:#x}"
            )


async def load_and_verify(
    load: Awaitable[None], tensors: Iterable[tuple[str, Tensor]], checksums: Sequence[int] | None, where: str
) -> None:
    """Verify tensors while they are being loaded, which costs no time where a core is free.

    A replica that loads serves nothing before its ``finish``: finding the damage meanwhile is early enough.

    Raises:
        WeightSyncError: as ``verify``.
    """
    if checksums is None:
        await load
        return
    verifying = asyncio.ensure_future(asyncio.to_thread(verify, tensors, checksums, where))
    try:
        await load
    finally:
        await asyncio.wait([verifying])  # it reads the memory that is given back next
    verifying.result()
