"""Process groups in which one sender broadcasts weights to engine processes. Needs only torch.

A group is created outside ``torch.distributed``'s registry, so that a process may be in several groups, and twice in
one. Its keys in the store equal those of ``torch.distributed`` for a group of that name, because engines with their own
join function use them (SGLang's ``init_weights_update_group``, and copies of ``init_custom_process_group``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from .checksums import require_intact
from .private_store import LOOPBACK, address_towards, join_store

Specs = Sequence[tuple[str, str, Sequence[int]]]
"""(name, dtype, shape) of the tensors of one broadcast, in order. Example: ``[("lm_head.weight", "bfloat16", [8,
4])]``."""

FIRST_DEVICE = {"gloo": "cpu", "nccl": "cuda"}
"""Device type under which torch stores the keys of a backend."""


class SenderGroup:
    """One process's membership in a group. Rank 0 sends."""

    def __init__(
        self,
        store: Store,
        name: str,
        backend: str,
        world_size: int,
        rank: int,
        timeout_s: float,
        *,
        host: str = LOOPBACK,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Join the group; returns when all ranks have joined.

        Args:
            host: the only address of this host at which gloo listens; NCCL chooses its own.
            on_close: called after the group is left.

        Raises:
            RuntimeError: other ranks did not join in time.
        """
        limit = timedelta(seconds=timeout_s)
        nested = PrefixStore(f"{name}/", PrefixStore(name, store))
        keys = PrefixStore(f"{FIRST_DEVICE[backend]}/", nested)
        self.name = name
        self._on_close = on_close
        self.says_when_over = backend == "gloo"
        """Whether a broadcast's future completes on arrival. NCCL's completes as soon as the operation is in its
        stream."""
        self._group: Any
        if backend == "gloo":
            gloo: Any = dist.ProcessGroupGloo
            settings = gloo._Options()
            settings._devices = [gloo.create_device(hostname=host)]
            settings._timeout = limit
            self._group = gloo(keys, rank, world_size, settings)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(keys, rank, world_size, options)
        self._group._set_sequence_number_for_group()

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Start sending (rank 0) or receiving a contiguous tensor; call ``wait`` on the result.

        On CUDA, ``wait`` makes the current stream wait.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        work: dist.Work = self._group.broadcast([tensor], options)
        return work

    def close(self) -> None:
        """Leave the group. Running operations fail."""
        group, self._group = self._group, None
        if group is None:
            return
        try:
            if hasattr(group, "abort"):
                group.abort()
        finally:
            self._on_close()


def join(
    address: str, name: str, backend: str, world_size: int, rank: int, timeout_s: float, secret: str | None = None
) -> SenderGroup:
    """Join a group as a receiver.

    Args:
        address: ``host:port`` of the sender's store.
        secret: the store's secret, if it has one.

    Raises:
        RuntimeError: the sender or another receiver did not join in time.
    """
    host, _, port = address.rpartition(":")
    met = join_store(host, int(port), secret, timedelta(seconds=timeout_s))
    try:
        own_address = address_towards(host, int(port))
        return SenderGroup(met.store, name, backend, world_size, rank, timeout_s, host=own_address, on_close=met.close)
    except BaseException:
        met.close()
        raise


class JoinedGroups:
    """The groups that one engine process has joined, by name; they outlive a sync."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[SenderGroup, str]] = {}
        self._flat: dict[str, torch.Tensor] = {}
        """name -> host memory for the group's broadcasts. It is kept, because first access to new pages costs as much
        as a copy."""

    def join(self, rendezvous: Mapping[str, Any], rank: int) -> None:
        """Join a group, unless already joined.

        Args:
            rendezvous: the fields of ``GroupRendezvous``.
            rank: rank of this process in its engine.

        Raises:
            RuntimeError: the sender or another receiver did not join in time.
        """
        name, backend = rendezvous["name"], rendezvous["backend"]
        if name not in self._groups:
            first_rank, world_size = rendezvous["first_rank"], rendezvous["world_size"]
            address, timeout_s = rendezvous["address"], rendezvous["timeout_s"]
            rank, secret = first_rank + rank, rendezvous.get("secret")
            self._groups[name] = join(address, name, backend, world_size, rank, timeout_s, secret), backend

    def receive(self, content: Mapping[str, Any], device: torch.device | str) -> list[tuple[str, torch.Tensor]]:
        """Receive the sender's next broadcast; the tensors are valid until the following one. Skips tensors without a
        name.

        Args:
            content: {"group": name, "tensors": ``Specs``, "checksums": one for each tensor, or None}.
            device: device for NCCL broadcasts.

        Raises:
            RuntimeError: the group was not joined, or the sender did not send in time.
            CorruptedTensorError: a tensor differs from what was sent.
        """
        name, specs, checksums = content["group"], content["tensors"], content.get("checksums")
        if name not in self._groups:
            raise RuntimeError(f"this process has not joined the group {name!r}")
        group, backend = self._groups[name]
        num_bytes = sum(torch.Size(shape).numel() * getattr(torch, dtype).itemsize for _, dtype, shape in specs)
        if backend == "gloo":
            flat = self._host_memory(name, num_bytes)
        else:
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)  # from torch's cache
        group.broadcast(flat).wait()
        tensors = tensors_in(flat, specs)
        if checksums is not None:
            require_intact(tensors, checksums)
        return [(name, tensor) for name, tensor in tensors if name]

    def leave(self, name: str) -> None:
        """Leave a group, if this process has joined it."""
        found = self._groups.pop(name, None)
        self._flat.pop(name, None)
        if found is not None:
            found[0].close()

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._groups):
            self.leave(name)

    def _host_memory(self, name: str, num_bytes: int) -> torch.Tensor:
        held = self._flat.get(name)
        if held is None or held.numel() < num_bytes:
            self._flat.pop(name, None)
            held = self._flat[name] = torch.empty(num_bytes, dtype=torch.uint8)
        return held[:num_bytes]


def tensors_in(flat: torch.Tensor, specs: Specs) -> list[tuple[str, torch.Tensor]]:
    """Split the bytes of one broadcast into tensors, as views.

    Args:
        flat: [num_bytes] uint8, the tensors' bytes in order without gaps, wider element types first.
        specs: (name, dtype, shape) of each tensor.
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
