"""The process group of a role's ranks, which roles of equal size in one process share."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols import RoleContext
from chatlearn_hosting.engine_side.private_store import PrivateStore
from chatlearn_hosting.rendezvous import make_default_group


@dataclass(slots=True)
class RoleGroup:
    """Membership in this process's default process group. The last member that closes destroys a group made here."""

    rank: int
    size: int
    _is_member: bool = True

    def all_reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce over all ranks, in place."""
        dist.all_reduce(values, operation)
        return values

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier()

    def close(self) -> bool:
        """Leave the process group. Returns whether this destroyed it; a repeated call does nothing."""
        if not self._is_member:
            return False
        self._is_member = False
        return _shared.leave()


class _SharedGroup:
    """The default process group that roles of this process made and share; torch allows one per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_members = 0
        self._is_ours = False
        self._store: PrivateStore | None = None

    def join(self, context: RoleContext, backend: str) -> None:
        with self._lock:
            if not dist.is_initialized():
                self._num_members = 0
                self._store = _make_group(context, backend)
                self._is_ours = True
            elif dist.get_world_size() != context.world_size or dist.get_rank() != context.rank:
                raise BackendError(
                    f"role {context.role!r} is rank {context.rank} of {context.world_size}, but this process already"
                    f" belongs to a process group as rank {dist.get_rank()} of {dist.get_world_size()}"
                )
            self._num_members += 1

    def leave(self) -> bool:
        with self._lock:
            self._num_members -= 1
            if self._num_members > 0 or not self._is_ours:
                return False
            self._is_ours = False
            if dist.is_initialized():
                dist.destroy_process_group()
            store, self._store = self._store, None
            if store is not None:
                store.close()
            return True


_shared = _SharedGroup()


def join_role_group(context: RoleContext, backend: str) -> RoleGroup:
    """Join the other ranks of a role at ``context.rendezvous``; a single rank needs none.

    An existing process group of the same size is shared.

    Args:
        context: of the role.
        backend: such as ``gloo``, or ``cpu:gloo,cuda:nccl``.

    Raises:
        BackendError: there is no rendezvous, another process group exists, or a rank did not join in time.
    """
    _shared.join(context, backend)
    return RoleGroup(context.rank, context.world_size)


def _make_group(context: RoleContext, backend: str) -> PrivateStore | None:
    """Initialise the default process group. Returns the store of the ranks, if they need one."""
    if context.rendezvous is None:
        if context.world_size > 1:
            raise BackendError(
                f"role {context.role!r} rank {context.rank} of {context.world_size} got no rendezvous; the runtime"
                " must give every rank the same tcp://host:port"
            )
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return None
    try:
        return make_default_group(
            backend,
            context.rendezvous,
            rank=context.rank,
            world_size=context.world_size,
            secret=context.rendezvous_secret,
        )
    except BackendError as error:
        raise BackendError(f"role {context.role!r}: {error}") from error
