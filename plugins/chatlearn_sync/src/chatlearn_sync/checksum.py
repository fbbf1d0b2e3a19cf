"""Checksums computed while tensors are copied, and compared while they load."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence

from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_hosting.engine_side.checksums import CorruptedTensorError, checksum, require_intact

PIECE_BYTES = 1 << 20
"""Size of the pieces that are summed and copied together, bytes; fits the L2 cache of current server CPUs."""


def copy_with_checksum(source: Tensor, target: Tensor) -> int:
    """Copy into a contiguous tensor of equal shape and dtype; returns the source's checksum.

    On the host this works piece by piece, so that each piece is summed and copied while it is in the cache.
    """
    source = source.contiguous()
    if source.nbytes <= PIECE_BYTES or source.device.type != "cpu":
        target.copy_(source)
        return checksum(source)
    flat, into = source.reshape(-1), target.reshape(-1)
    step = PIECE_BYTES // source.element_size()  # whole words, so that the pieces' sums add up to the tensor's
    total = 0
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        total += checksum(piece)
        into[start : start + step].copy_(piece)
    return total % (1 << 64)


def verify(tensors: Iterable[tuple[str, Tensor]], checksums: Sequence[int], where: str) -> None:
    """Compare the checksums of tensors with the sender's, in order.

    Args:
        checksums: the sender's checksums, one per tensor.
        where: prefix of the error message.

    Raises:
        WeightSyncError: a tensor differs from the one sent; names it.
    """
    try:
        require_intact(tensors, checksums)
    except CorruptedTensorError as error:
        raise WeightSyncError(f"{where}: {error}") from error


async def load_and_verify(
    load: Awaitable[None], tensors: Iterable[tuple[str, Tensor]], checksums: Sequence[int] | None, where: str
) -> None:
    """Load and verify tensors concurrently; verification is free if a CPU core is idle.

    A loading replica serves no request before its ``finish``, so damage found while loading is found in time.

    Args:
        checksums: the sender's checksums; None skips verification.

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
        await asyncio.wait([verifying])  # it reads memory that the caller frees next
    verifying.result()
