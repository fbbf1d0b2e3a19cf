"""Process groups in which one sender broadcasts weights to processes of engines. Needs torch and nothing else.

A group is made beside ``torch.distributed``'s own registry, so that one process may be in several, and twice in one.
Its keys in the store are those of ``torch.distributed`` for a group of that name, which engines with a join of their
own use (SGLang's ``init_weights_update_group``, and ``init_custom_process_group`` wherever that was copied).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

FIRST_DEVICE = {"gloo": "cpu", "nccl": "cuda"}
"""The device type under which torch puts the keys of a backend."""


class SenderGroup:
    """One process's membership in a group. Rank 0 sends."""

    def __init__(self, store: Store, name: str, backend: str, world_size: int, rank: int, timeout_s: float) -> None:
        """Meet the others; returns when all are there.

        Raises:
            RuntimeError: they did not come in time.
        """
        limit = timedelta(seconds=timeout_s)
        nested = PrefixStore(f"{name}/", PrefixStore(name, store))
        keys = PrefixStore(f"{FIRST_DEVICE[backend]}/", nested)
        self.name = name
        self._group: Any
        if backend == "gloo":
            self._group = dist.ProcessGroupGloo(keys, rank, world_size, timeout=limit)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(keys, rank, world_size, options)
        self._group._set_sequence_number_for_group()

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Start to send (rank 0) or receive a contiguous tensor; ``wait`` on what is returned.

        On CUDA, ``wait`` makes the current stream wait.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        work: dist.Work = self._group.broadcast([tensor], options)
        return work

    def close(self) -> None:
        """Leave. What still runs in the group fails."""
        group, self._group = self._group, None
        if group is not None and hasattr(group, "abort"):
            group.abort()


def join(address: str, name: str, backend: str, world_size: int, rank: int, timeout_s: float) -> SenderGroup:
    """Join a group as a receiver.

    Args:
        address: ``host:port`` of the sender's store.

    Raises:
        RuntimeError: the sender or another receiver did not come in time.
    """
    host, _, port = address.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    return SenderGroup(store, name, backend, world_size, rank, timeout_s)


def tensors_in(flat: torch.Tensor, specs: list[tuple[str, str, list[int]]]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of one broadcast, as views.

    Args:
        flat: [num_bytes] uint8, the tensors' bytes in order without gaps, wider element types first.
        specs: (name, dtype, shape).
    """
    found: list[tuple[str, torch.Tensor]] = []
    offset = 0
    for name, dtype, shape in specs:
        kind = getattr(torch, dtype)
        count = kind.itemsize
        for size in shape:
            count *= size
        found.append((name, flat[offset : offset + count].view(kind).view(shape)))
        offset += count
    return found
