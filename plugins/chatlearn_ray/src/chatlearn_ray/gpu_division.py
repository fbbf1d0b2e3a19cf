"""Which GPUs of a slot with several each worker drives. Pure.

Ray divides single GPUs only: it cannot give two GPUs to an engine and the same two to two ranks. So a slot's GPUs are
reserved from Ray as a whole, and divided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chatlearn_core.exceptions import ConfigError


@dataclass(slots=True, frozen=True)
class GpuDemand:
    """One worker in a slot."""

    role: str
    num_gpus: int
    """How many it drives; they are neighbours."""
    takes_turns: bool = True
    """Whether it may share its GPUs with other roles: one that does not take turns has them alone."""


def divide_gpus(num_gpus: int, demands: Sequence[GpuDemand], pool: str, slot: int) -> list[tuple[int, ...]]:
    """The GPUs of each worker, counted from 0 within the slot.

    Workers of one role never share a GPU. Every worker gets those on which the fewest others sit, the lowest of them:
    roles that fit beside one another do not share, and the others share evenly. A worker of ``n`` GPUs starts at a
    multiple of ``n``, so that its GPUs are neighbours by hardware too. Who does not take turns gets the last ones.

    Args:
        num_gpus: of the slot.
        pool, slot: where this is, for messages.

    Raises:
        ConfigError: the workers of a role drive more GPUs than there are for it; shows the arithmetic.
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
