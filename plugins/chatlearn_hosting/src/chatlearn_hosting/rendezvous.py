"""The rendezvous of a role's ranks, and the addresses at which their process groups listen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from chatlearn_core.exceptions import BackendError
from chatlearn_hosting.engine_side.private_store import (
    LOOPBACK,
    PrivateStore,
    address_towards,
    interface_of,
    join_store,
    open_store,
)

WAIT = default_pg_timeout
"""Time for which ranks wait for each other: torch's default."""
GLOO = "GLOO_SOCKET_IFNAME"


def make_default_group(
    backend: str, rendezvous: str, *, rank: int, world_size: int, secret: str | None = None
) -> PrivateStore | None:
    """Initialise ``torch.distributed`` for a role's ranks, with a store and connections that no other process can use.

    Args:
        backend: such as ``gloo``, or ``cpu:gloo,cuda:nccl``.
        rendezvous: ``RoleContext.rendezvous``; anything but ``tcp://`` is passed to torch unchanged.
        rank: rank of this process.
        world_size: number of ranks.
        secret: ``RoleContext.rendezvous_secret``.

    Returns:
        The store, to be closed after the group is destroyed; None if torch created it.

    Raises:
        BackendError: the ranks cannot connect.
    """
    store: PrivateStore | None = None
    try:
        with group_interfaces(rendezvous):
            if rendezvous.startswith("tcp://"):
                store = meet(rendezvous, rank, secret, WAIT)
                dist.init_process_group(backend, store=store.store, rank=rank, world_size=world_size)
            else:
                dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world_size)
    except (RuntimeError, ValueError) as error:
        if store is not None:
            store.close()
        raise BackendError(
            f"rank {rank} of {world_size} could not join the other ranks at {rendezvous}: {error}"
        ) from error
    return store


def meet(rendezvous: str, rank: int, secret: str | None, timeout: timedelta) -> PrivateStore:
    """Return the store of a role's ranks: rank 0 opens it at the rendezvous address only, the others join it.

    ``torch.distributed.init_process_group(init_method=rendezvous)`` would listen on every interface and admit any
    process.

    Args:
        rendezvous: ``tcp://host:port``, as in ``RoleContext.rendezvous``; the host is rank 0's.
        rank: rank of this process.
        secret: ``RoleContext.rendezvous_secret``.
        timeout: timeout of the store's operations, and of the wait for rank 0.

    Raises:
        BackendError: rank 0 cannot listen at the address, or another rank cannot reach it in time.
    """
    address = urlsplit(rendezvous)
    if address.scheme != "tcp" or address.hostname is None or address.port is None:
        raise BackendError(f"the rendezvous must be tcp://host:port, not {rendezvous!r}")
    try:
        if rank == 0:
            return open_store(address.hostname, address.port, secret, timeout)
        return join_store(address.hostname, address.port, secret, timeout)
    except (OSError, RuntimeError) as error:
        raise BackendError(f"rank {rank} could not join the other ranks at {rendezvous}: {error}") from error


@contextmanager
def group_interfaces(rendezvous: str | None) -> Iterator[None]:
    """Make gloo groups that are created inside listen only where the ranks can reach each other.

    That is loopback for ranks on one host (``rendezvous`` on loopback, or None), and otherwise the interface towards
    the rendezvous. A user's ``GLOO_SOCKET_IFNAME`` takes precedence. NCCL is not restricted: it reads its variable
    ``NCCL_SOCKET_IFNAME`` once per process, and the process may also be in groups over several hosts.
    """
    host = urlsplit(rendezvous or "").hostname or LOOPBACK
    if os.environ.get(GLOO):
        yield
        return
    try:
        interface = interface_of(address_towards(host))
    except OSError:  # the rendezvous itself will report the error
        interface = None
    if interface is None:
        yield
        return
    os.environ[GLOO] = interface
    try:
        yield
    finally:
        del os.environ[GLOO]
