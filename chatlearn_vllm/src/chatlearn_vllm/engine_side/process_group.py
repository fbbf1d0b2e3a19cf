"""A worker's place in a process group whose rank 0 is a trainer rank that broadcasts weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CONNECT_PREFIXES = {"gloo": "cpu/", "nccl": "cuda/"}
"""What ``torch.distributed`` puts before the keys of a group's first backend in its store."""


class SenderGroup:
    """One group; receives what rank 0 sends."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device

    def receive(self, tensors: Sequence[tuple[str, str, Sequence[int]]]) -> Iterator[tuple[str, Tensor]]:
        """Receive one bucket, sent as one flat tensor of bytes, and cut it up.

        Args:
            tensors: (name, dtype, shape), in the order in which they lie in the bucket, without gaps.

        Raises:
            RuntimeError: the sender did not send within the group's timeout, or is gone.
        """
        sizes = [getattr(torch, dtype).itemsize * torch.Size(shape).numel() for _, dtype, shape in tensors]
        bucket = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([bucket], options).wait()
        start = 0
        for (name, dtype, shape), size in zip(tensors, sizes, strict=True):
            piece = bucket[start : start + size]
            kind: torch.dtype = getattr(torch, dtype)
            if start % kind.itemsize:
                piece = piece.clone()  # a view needs an aligned start
            start += size
            yield name, piece.view(kind).view(tuple(shape))

    def close(self) -> None:
        """Leave. A group whose other members are gone is left all the same."""
        self._group.shutdown()


def join_group(
    name: str, address: str, backend: str, world_size: int, rank: int, timeout_s: float, device: torch.device
) -> SenderGroup:
    """Meet the sender; returns when all members are there.

    The group is that of ``torch.distributed`` under ``tcp://address`` with this name, as engines make it for weight
    updates, but apart from torch's table of groups: several replicas, and the sender, may live in one process.

    Args:
        name: of the group.
        address: ``host:port``, where the sender's store listens.
        backend: ``gloo`` or ``nccl``.
        world_size: sender and receivers.
        rank: this worker's.
        timeout_s: for meeting and for every broadcast.
        device: this worker's.

    Raises:
        RuntimeError: the others did not come within ``timeout_s``.
    """
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    root = dist.TCPStore(host.strip("[]"), int(port), world_size, is_master=False, timeout=timeout)
    store: Any = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, root))
    store = dist.PrefixStore(_CONNECT_PREFIXES[backend], store)
    if backend == "gloo":
        return SenderGroup(dist.ProcessGroupGloo(store, rank, world_size, timeout), torch.device("cpu"))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return SenderGroup(dist.ProcessGroupNCCL(store, rank, world_size, options), device)
