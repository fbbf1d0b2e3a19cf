"""Checksums of tensors while they are copied, and while they are loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence

from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_hosting.engine_side.checksums import CorruptedTensorError, checksum, require_intact

PIECE_BYTES = 1 << 20
"""Fits into the second-level cache of any processor that this is worth running on."""


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
    try:
        require_intact(tensors, checksums)
    except CorruptedTensorError as error:
        raise WeightSyncError(f"{where}: {error}") from error


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
