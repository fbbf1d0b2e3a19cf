"""Who sits where: from roles and pools to bundles that are reserved together, and a seat for every worker. Pure.

A bundle lies on one node. Roles with places of their own get a group of bundles a replica; a pool is one group, in
which roles that occupy the same slot share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import Device
from chatlearn_ray.options import RayRuntimeOptions, SeatOptions

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
Amounts = Mapping[str, float]
"""Ray resource name (``CPU``, ``GPU``, custom) -> amount."""

STRATEGIES: dict[str, Strategy] = {
    "pack": "PACK",
    "spread": "SPREAD",
    "one_node": "STRICT_PACK",
    "node_each": "STRICT_SPREAD",
}
_TOLERANCE = 1e-6
"""Ray counts in ten-thousandths."""


@dataclass(slots=True, frozen=True)
class SeatedRole:
    """What of a role matters for its place."""

    name: str
    kind: str
    device: str
    replicas: int
    ranks: int

    @property
    def num_workers(self) -> int:
        """Processes: a rank of a trainer each, a replica of a generator or reward each."""
        return self.ranks if self.kind == "trainer" else self.replicas

    @property
    def devices_per_worker(self) -> int:
        """A generator's process drives all ranks of its engine."""
        return self.ranks if self.kind == "generator" else 1

    @property
    def wants_gpu(self) -> bool:
        """Whether its device is a GPU; ``auto`` must have been resolved."""
        return self.kind != "reward" and self.device.startswith("cuda")


@dataclass(slots=True, frozen=True)
class BundleGroup:
    """Bundles that are reserved together."""

    name: str
    strategy: Strategy
    bundles: tuple[Amounts, ...]


@dataclass(slots=True, frozen=True)
class Seat:
    """The place of one worker."""

    role: str
    worker: int
    group: str
    bundle: int
    amounts: Amounts

    @property
    def slot(self) -> str:
        """Such as ``pool 'gpus', slot 0``."""
        return f"{self.group}, slot {self.bundle}"

    @property
    def text(self) -> str:
        """Such as ``pool 'gpus', slot 0: 1 CPU, 0.5 GPU``."""
        return f"{self.slot}: {amounts_text(self.amounts)}"

    @property
    def device(self) -> Device:
        """What it will occupy, as far as that is known before Ray assigns GPUs: workers with fractions of a GPU in one
        slot share it, whole GPUs are a worker's own, and on the host workers of one slot share its memory.
        """
        gpus = self.amounts.get("GPU", 0.0)
        if gpus and gpus == int(gpus):
            return Device(f"{self.slot}, GPU of {self.role} {self.worker}", is_gpu=True)
        return Device(self.slot, is_gpu=gpus > 0)


@dataclass(slots=True, frozen=True)
class Seating:
    """All groups and seats of a run."""

    groups: tuple[BundleGroup, ...]
    seats: tuple[Seat, ...]

    def of(self, role: str) -> list[Seat]:
        """A role's seats, by worker."""
        return [seat for seat in self.seats if seat.role == role]

    @property
    def total(self) -> Amounts:
        """Everything that is reserved."""
        return added(bundle for group in self.groups for bundle in group.bundles)


def seat_roles(roles: Sequence[SeatedRole], options: RayRuntimeOptions) -> Seating:
    """Give every worker a seat.

    Raises:
        ConfigError: an unknown role or pool, a pool with too few slots, or a slot that its roles overfill.
    """
    known = {role.name for role in roles}
    for name, seat in options.roles.items():
        if seat.pool is not None and seat.pool not in options.pools:
            raise ConfigError(
                f"runtime.options.roles.{name}.pool is {seat.pool!r}, but runtime.options.pools has "
                f"{', '.join(map(repr, sorted(options.pools))) or 'none'}. Define it, or remove the setting"
            )
    groups: list[BundleGroup] = []
    seats: list[Seat] = []
    for role in roles:
        wanted = options.roles.get(role.name, SeatOptions())
        if wanted.pool is None:
            own_groups, own_seats = _places_of_its_own(role, wanted)
            groups += own_groups
            seats += own_seats
    for name, pool in options.pools.items():
        bundle = positive({"CPU": pool.cpus, "GPU": pool.gpus, **pool.resources})
        guests = [
            (r, options.roles[r.name]) for r in roles if r.name in options.roles and options.roles[r.name].pool == name
        ]
        if not guests:
            continue  # an evaluation has some of the roles only: what nobody uses is not reserved
        groups.append(BundleGroup(f"pool {name!r}", STRATEGIES[pool.strategy], (bundle,) * pool.slots))
        seats += _seats_in_pool(name, bundle, pool.slots, guests)
    order = {role.name: index for index, role in enumerate(roles)}
    seats.sort(key=lambda seat: (order[seat.role], seat.worker))
    assert {seat.role for seat in seats} <= known
    return Seating(tuple(groups), tuple(seats))


def _places_of_its_own(role: SeatedRole, wanted: SeatOptions) -> tuple[list[BundleGroup], list[Seat]]:
    gpus = wanted.gpus if wanted.gpus is not None else float(role.devices_per_worker if role.wants_gpu else 0)
    cpus = wanted.cpus if wanted.cpus is not None else 1.0
    amounts = positive({"CPU": cpus, "GPU": gpus, **wanted.resources})
    strategy: Strategy = "STRICT_PACK" if wanted.one_node else "PACK"
    if role.kind == "trainer":
        group = BundleGroup(f"role {role.name!r}", strategy, (amounts,) * role.num_workers)
        return [group], [Seat(role.name, i, group.name, i, amounts) for i in range(role.num_workers)]
    groups = [BundleGroup(f"role {role.name!r}, replica {i}", strategy, (amounts,)) for i in range(role.num_workers)]
    return groups, [Seat(role.name, i, group.name, 0, amounts) for i, group in enumerate(groups)]


def _seats_in_pool(
    name: str, bundle: Amounts, num_slots: int, guests: Sequence[tuple[SeatedRole, SeatOptions]]
) -> list[Seat]:
    occupants: list[list[tuple[SeatedRole, SeatOptions, int]]] = [[] for _ in range(num_slots)]
    for role, wanted in guests:
        last = wanted.first_slot + role.num_workers
        if last > num_slots:
            raise ConfigError(
                f"role {role.name!r} has {role.num_workers} worker(s) from slot {wanted.first_slot} on, which needs "
                f"{last} slots, but pool {name!r} has {num_slots} (runtime.options.pools.{name}.slots). Raise it, or "
                "lower the role's ranks or replicas"
            )
        for worker in range(role.num_workers):
            occupants[wanted.first_slot + worker].append((role, wanted, worker))
    # A role takes the same from each of its slots: its equal share of the most crowded one.
    crowd = {
        role.name: max(len(slot) for slot in occupants if any(r is role for r, _, _ in slot)) for role, _ in guests
    }
    on_gpu = {
        role.name: max(sum(r.wants_gpu for r, _, _ in slot) for slot in occupants if any(r is role for r, _, _ in slot))
        for role, _ in guests
    }
    seats: list[Seat] = []
    for index, slot in enumerate(occupants):
        here: list[Seat] = []
        for role, wanted, worker in slot:
            cpus = wanted.cpus if wanted.cpus is not None else bundle.get("CPU", 0.0) / crowd[role.name]
            gpus = wanted.gpus
            if gpus is None:
                gpus = bundle.get("GPU", 0.0) / on_gpu[role.name] if role.wants_gpu else 0.0
            amounts = positive({"CPU": _floor(cpus), "GPU": _floor(gpus), **wanted.resources})
            here.append(Seat(role.name, worker, f"pool {name!r}", index, amounts))
        taken = added(seat.amounts for seat in here)
        for resource, amount in taken.items():
            if amount > bundle.get(resource, 0.0) + _TOLERANCE:
                shares = " + ".join(f"{seat.role} {seat.amounts.get(resource, 0.0):g}" for seat in here)
                raise ConfigError(
                    f"slot {index} of pool {name!r} has {bundle.get(resource, 0.0):g} {resource}, but its roles take "
                    f"{shares} = {amount:g}. Give the slot more, or the roles less (runtime.options.roles)"
                )
        seats += here
    return seats


def shortage(seating: Seating, nodes: Mapping[str, Amounts]) -> str | None:
    """Why a cluster with these nodes can never hold the run, with the arithmetic; None if it may.

    Args:
        nodes: node name -> its total resources, whoever uses them now.
    """
    have = added(nodes.values())
    need = seating.total
    lines: list[str] = []
    for resource, amount in need.items():
        if amount > have.get(resource, 0.0) + _TOLERANCE:
            parts = " + ".join(
                f"{sum(bundle.get(resource, 0.0) for bundle in group.bundles):g} ({group.name})"
                for group in seating.groups
                if any(bundle.get(resource) for bundle in group.bundles)
            )
            lines.append(
                f"{resource}: {parts} = {amount:g}, and {len(nodes)} node(s) have {have.get(resource, 0.0):g}: "
                f"{amount - have.get(resource, 0.0):g} missing"
            )
    for group in seating.groups:
        wanted = [added(group.bundles)] if group.strategy == "STRICT_PACK" else list(group.bundles)
        fitting = [node for node in nodes.values() if all(_fits(amounts, node) for amounts in wanted[:1])]
        if not fitting:
            what = "together " if group.strategy == "STRICT_PACK" and len(group.bundles) > 1 else ""
            largest = "; ".join(f"{name} has {amounts_text(node)}" for name, node in nodes.items()) or "there is none"
            lines.append(f"{group.name} needs {what}{amounts_text(wanted[0])} on one node: {largest}")
        elif group.strategy == "STRICT_SPREAD" and len(fitting) < len(group.bundles):
            lines.append(
                f"{group.name} needs {len(group.bundles)} nodes with {amounts_text(wanted[0])} each, and "
                f"{len(fitting)} have it"
            )
    return "\n".join(f"  {line}" for line in lines) or None


def _fits(amounts: Amounts, node: Amounts) -> bool:
    return all(amount <= node.get(resource, 0.0) + _TOLERANCE for resource, amount in amounts.items())


def added(parts: Iterable[Amounts]) -> dict[str, float]:
    """Sum by resource."""
    total: dict[str, float] = {}
    for part in parts:
        for resource, amount in part.items():
            total[resource] = total.get(resource, 0.0) + amount
    return total


def positive(amounts: Amounts) -> dict[str, float]:
    """Without what is zero."""
    return {resource: amount for resource, amount in amounts.items() if amount > 0}


def amounts_text(amounts: Amounts) -> str:
    """``1 CPU, 0.5 GPU``; what Ray adds by itself (memory, node names) is left out."""
    shown = [f"{amount:g} {resource}" for resource, amount in _interesting(amounts)]
    return ", ".join(shown) or "nothing"


def _interesting(amounts: Amounts) -> Iterator[tuple[str, float]]:
    for resource, amount in amounts.items():
        if resource not in ("memory", "object_store_memory") and not resource.startswith("node:"):
            yield resource, amount


def _floor(amount: float) -> float:
    """To Ray's precision, so that equal shares never exceed the whole."""
    return int(amount * 10_000 + _TOLERANCE) / 10_000
