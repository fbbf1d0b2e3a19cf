"""Divides the GPUs of a slot with several among its workers. Pure functions.

Ray divides only single GPUs: it cannot give two GPUs to an engine and the same two to two ranks. The runtime therefore
reserves all GPUs of a slot from Ray, and divides them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chatlearn_core.exceptions import ConfigError


@dataclass(slots=True, frozen=True)
class GpuDemand:
    """The GPUs that one worker in a slot needs."""

    role: str
    num_gpus: int
    """Number of GPUs that it drives; they are adjacent."""
    takes_turns: bool = True
    """Whether it may share its GPUs with other roles; otherwise it has them exclusively."""


def divide_gpus(num_gpus: int, demands: Sequence[GpuDemand], pool: str, slot: int) -> list[tuple[int, ...]]:
    """Return the GPUs of each worker, counted from 0 within the slot.

    Workers of one role never share a GPU. Every worker gets the GPUs with the fewest other workers, the lowest of
    several: roles that fit together do not share, others share evenly. A worker with ``n`` GPUs starts at a multiple of
    ``n``, so that its GPUs are adjacent in hardware too. Workers that take no turns get the last GPUs. Example: on 4
    GPUs, two ranks with one GPU each and an engine with two get ``[(0,), (1,), (2, 3)]``.

    Args:
        num_gpus: number of GPUs in the slot.
        demands: the workers.
        pool, slot: the slot, for messages.

    Raises:
        ConfigError: the workers of a role need more GPUs than are left for it; shows the arithmetic.
    """
    guests: list[set[str]] = [set() for _ in range(num_gpus)]
    alone: dict[str, int] = {}
    found: dict[int, tuple[int, ...]] = {}
    for index, demand in sorted(enumerate(demands), key=lambda pair: pair[1].takes_turns):
        size = demand.num_gpus
        if demand.takes_turns:
            runs = [range(start, start + size) for start in range(0, num_gpus - size + 1, size)]
            free = [run for run in runs if not any(guests[gpu] & {demand.role, *alone} for gpu in run)]
        else:
            runs = [range(start, start + size) for start in range(num_gpus - size, -1, -1)]
            free = [run for run in runs if not any(guests[gpu] for gpu in run)]
        if not free:
            _refuse(num_gpus, demand, demands, alone, pool, slot)
        run = min(free, key=lambda run: sum(len(guests[gpu]) for gpu in run))
        for gpu in run:
            guests[gpu].add(demand.role)
        if not demand.takes_turns:
            alone[demand.role] = alone.get(demand.role, 0) + size
        found[index] = tuple(run)
    return [found[index] for index in range(len(demands))]


def _refuse(
    num_gpus: int, demand: GpuDemand, demands: Sequence[GpuDemand], alone: dict[str, int], pool: str, slot: int
) -> None:
    workers = sum(other.role == demand.role for other in demands)
    total = workers * demand.num_gpus
    others = {role: taken for role, taken in alone.items() if role != demand.role}
    apart = f", of which {', '.join(f'{role} has {taken} alone' for role, taken in others.items())}" if others else ""
    raise ConfigError(
        f"role {demand.role!r} has {workers} worker(s) in slot {slot} of pool {pool!r} that drive {demand.num_gpus} "
        f"GPU(s) each = {total}, but the slot has {num_gpus}{apart}. Raise runtime.options.pools.{pool}.gpus, lower "
        f"runtime.options.roles.{demand.role}.per_slot, or let its engine drive fewer"
    )
