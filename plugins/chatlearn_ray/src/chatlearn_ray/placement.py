"""Places all workers: turns roles and pools into bundles that are reserved together. Pure functions.

A bundle is on one node. A role with its own places gets a group of bundles for each replica; a pool is one group, in
which roles in the same slot share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.compatibility import RoleSize
from chatlearn_core.plugins.records import Placement
from chatlearn_core.protocols import Device
from chatlearn_ray.gpu_division import GpuDemand, divide_gpus
from chatlearn_ray.options import NO_ROLE, PlacementOptions, PoolOptions, RayRuntimeOptions
from chatlearn_ray.resources import TOLERANCE, ResourceAmounts, added, amounts_text, floored, positive

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

STRATEGIES: dict[str, Strategy] = {
    "pack": "PACK",
    "spread": "SPREAD",
    "one_node": "STRICT_PACK",
    "node_each": "STRICT_SPREAD",
}


@dataclass(slots=True, frozen=True)
class PlacedRole:
    """The properties of a role that determine its placement."""

    name: str
    kind: str
    device: str
    replicas: int
    ranks: int
    devices: int | None = None
    """Devices of one generator replica, if its engine's arguments say it; otherwise its ranks."""
    together: int = 1
    """Number of consecutive ranks of a trainer that belong on one node."""
    together_why: str = ""
    near: str | None = None
    """Role next to which this role should be placed."""
    near_why: str = ""

    @property
    def num_workers(self) -> int:
        """Number of processes: one per rank of a trainer, one per replica of another role."""
        return self.ranks if self.kind == "trainer" else self.replicas

    @property
    def devices_per_worker(self) -> int:
        """Number of devices of a process; a generator's process drives all devices of its engine."""
        return (self.devices or self.ranks) if self.kind == "generator" else 1

    @property
    def wants_gpu(self) -> bool:
        """Whether its device is a GPU; ``auto`` must have been resolved."""
        return self.kind in ("trainer", "generator") and self.device.startswith("cuda")


@dataclass(slots=True, frozen=True)
class BundleGroup:
    """Bundles that are reserved together."""

    name: str
    strategy: Strategy
    bundles: tuple[ResourceAmounts, ...]
    why: tuple[str, ...] = ()
    """Reasons why its bundles, or the ranks in one bundle, are kept together."""


@dataclass(slots=True, frozen=True)
class WorkerPlacement:
    """The place of one worker."""

    role: str
    worker: int
    group: str
    bundle: int
    amounts: ResourceAmounts
    """Resources that Ray counts."""
    gpus: tuple[int, ...] = ()
    """GPUs in a slot with several, counted from 0 within it and assigned by ``gpu_division``; Ray does not
    count them."""

    @property
    def slot(self) -> str:
        """Such as ``pool 'gpus', slot 0``."""
        return f"{self.group}, slot {self.bundle}"

    @property
    def text(self) -> str:
        """Such as ``pool 'gpus', slot 0: 1 CPU, 0.5 GPU``, or ``pool 'nodes', slot 0: 1 CPU, its GPUs 2 and 3``."""
        own = f", its GPU{'s' if len(self.gpus) > 1 else ''} {' and '.join(map(str, self.gpus))}" if self.gpus else ""
        return f"{self.slot}: {amounts_text(self.amounts)}{own}"

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that the worker will occupy, as far as known before Ray assigns GPUs.

        Assigned GPUs of a divided slot are known. Workers with fractions of a GPU in one slot share it, whole GPUs
        belong to one worker, and workers without GPUs share the host memory of their slot.
        """
        if self.gpus:
            return tuple(Device(f"{self.slot}, GPU {gpu}", is_gpu=True) for gpu in self.gpus)
        gpus = self.amounts.get("GPU", 0.0)
        if gpus and gpus == int(gpus):
            return (Device(f"{self.slot}, GPU of {self.role} {self.worker}", is_gpu=True),)
        return (Device(self.slot, is_gpu=gpus > 0),)


@dataclass(slots=True, frozen=True)
class PlacementPlan:
    """All groups and placements of a run."""

    groups: tuple[BundleGroup, ...]
    placements: tuple[WorkerPlacement, ...]

    def of(self, role: str) -> list[WorkerPlacement]:
        """Return a role's placements, by worker."""
        return [placement for placement in self.placements if placement.role == role]

    def why(self, role: str) -> list[str]:
        """Return why a role's workers are kept together, or next to another role's, beyond the configuration."""
        own = {placement.group for placement in self.placements if placement.role == role}
        return [text for group in self.groups if group.name in own for text in group.why if f"{role!r}" in text]

    def on_one_node(self, *roles: str) -> bool:
        """Whether all workers of these roles are certainly on one node."""
        groups = {placement.group for placement in self.placements if placement.role in roles}
        strict = {group.name for group in self.groups if group.strategy == "STRICT_PACK" or len(group.bundles) == 1}
        return len(groups) == 1 and groups <= strict

    def beside(self, role: str, other: str) -> bool:
        """Whether every worker of a role certainly has one of the other role on its node; a slot is on one node."""
        slots = {placement.slot for placement in self.of(other)}
        return all(placement.slot in slots for placement in self.of(role))

    @property
    def total(self) -> ResourceAmounts:
        """Sum of all reserved resources."""
        return added(bundle for group in self.groups for bundle in group.bundles)


def place_roles(roles: Sequence[PlacedRole], options: RayRuntimeOptions) -> PlacementPlan:
    """Assign a placement to every worker.

    Raises:
        ConfigError: a pool has too few slots, or a slot's roles take too much.
    """
    known = {role.name for role in roles}
    groups: list[BundleGroup] = []
    placements: list[WorkerPlacement] = []
    for role in roles:
        wanted = options.roles.get(role.name, PlacementOptions())
        if wanted.pool is None:
            own_groups, own_placements = _places_of_its_own(role, wanted)
            groups += own_groups
            placements += own_placements
    for role in roles:
        groups, placements = _moved_next_to(role, options, groups, placements)
    for name, pool in options.pools.items():
        bundle = positive({"CPU": pool.cpus, "GPU": pool.gpus, **pool.resources})
        guests = [
            (r, options.roles[r.name]) for r in roles if r.name in options.roles and options.roles[r.name].pool == name
        ]
        if not guests:
            continue  # an evaluation has only some roles: do not reserve unused places
        groups.append(BundleGroup(f"pool {name!r}", STRATEGIES[pool.strategy], (bundle,) * pool.slots))
        placements += _placements_in_pool(name, pool, bundle, guests)
    order = {role.name: index for index, role in enumerate(roles)}
    placements.sort(key=lambda placement: (order[placement.role], placement.worker))
    assert {placement.role for placement in placements} <= known
    return PlacementPlan(tuple(groups), tuple(placements))


def _places_of_its_own(role: PlacedRole, wanted: PlacementOptions) -> tuple[list[BundleGroup], list[WorkerPlacement]]:
    gpus = wanted.gpus if wanted.gpus is not None else float(role.devices_per_worker if role.wants_gpu else 0)
    cpus = wanted.cpus if wanted.cpus is not None else 1.0
    amounts = positive({"CPU": cpus, "GPU": gpus, **wanted.resources})
    strategy: Strategy = "STRICT_PACK" if wanted.one_node else "PACK"
    if role.kind == "trainer":
        # A bundle is on one node: ranks that communicate most share one, and the group keeps bundles near.
        together = role.together if wanted.together is None else wanted.together
        if role.num_workers % together:
            together = 1  # the backend reports what is wrong with its layout
        bundle = {resource: amount * together for resource, amount in amounts.items()}
        why = []
        if together > 1:
            reason = role.together_why if wanted.together is None else f"runtime.options.roles.{role.name}.together"
            why.append(f"every {together} ranks of {role.name!r} on one node ({reason})")
        group = BundleGroup(f"role {role.name!r}", strategy, (bundle,) * (role.num_workers // together), tuple(why))
        return [group], [
            WorkerPlacement(role.name, i, group.name, i // together, amounts) for i in range(role.num_workers)
        ]
    groups = [BundleGroup(f"role {role.name!r}, replica {i}", strategy, (amounts,)) for i in range(role.num_workers)]
    return groups, [WorkerPlacement(role.name, i, group.name, 0, amounts) for i, group in enumerate(groups)]


def _moved_next_to(
    role: PlacedRole, options: RayRuntimeOptions, groups: list[BundleGroup], placements: list[WorkerPlacement]
) -> tuple[list[BundleGroup], list[WorkerPlacement]]:
    """Move the role's bundles into the group of the role it belongs near, because Ray packs a group on few nodes."""
    wanted = options.roles.get(role.name, PlacementOptions())
    near = wanted.near or role.near
    if near is None or near in (role.name, NO_ROLE) or wanted.one_node:
        return groups, placements
    pools = {name: options.roles[name].pool for name in (role.name, near) if name in options.roles}
    own = {placement.group: None for placement in placements if placement.role == role.name}
    host = next((group for group in groups if any(s.role == near and s.group == group.name for s in placements)), None)
    if host is None or any(pools.values()) or host.name in own:
        return groups, placements
    if wanted.near is None and host.strategy != "PACK":
        return (
            groups,
            placements,
        )  # a derived ``near`` is a preference: it must not subject this role to the other role's strict strategy
    reason = role.near_why if wanted.near is None else f"runtime.options.roles.{role.name}.near"
    moved = [group for group in groups if group.name in own]
    first = {}
    bundles = list(host.bundles)
    for group in moved:
        first[group.name] = len(bundles)
        bundles += group.bundles
    why = (*host.why, f"{role.name!r} near {near!r} ({reason})")
    name = f"{host.name} and {role.name!r}"
    merged = BundleGroup(name, host.strategy, tuple(bundles), why)
    placed = [
        replace(placement, group=name, bundle=first.get(placement.group, 0) + placement.bundle)
        if placement.group in first or placement.group == host.name
        else placement
        for placement in placements
    ]
    return [merged if group is host else group for group in groups if group not in moved], placed


def _placements_in_pool(
    name: str, pool: PoolOptions, bundle: ResourceAmounts, guests: Sequence[tuple[PlacedRole, PlacementOptions]]
) -> list[WorkerPlacement]:
    """Place all roles of a pool. The runtime divides slots with several GPUs itself; Ray divides all others."""
    is_divided = pool.gpus > 1
    if is_divided and pool.gpus != int(pool.gpus):
        raise ConfigError(
            f"runtime.options.pools.{name}.gpus is {pool.gpus:g}; a slot with several GPUs needs a whole number"
        )
    for role, wanted in guests:
        _check_gpus(role, wanted, name, pool.gpus)
    per_slot = {role.name: _workers_per_slot(role, wanted, pool.gpus) for role, wanted in guests}
    occupants: list[list[tuple[PlacedRole, PlacementOptions, int]]] = [[] for _ in range(pool.slots)]
    for role, wanted in guests:
        last = wanted.first_slot - (-role.num_workers // per_slot[role.name])
        if last > pool.slots:
            each = f" ({per_slot[role.name]} a slot)" if per_slot[role.name] > 1 else ""
            raise ConfigError(
                f"role {role.name!r} has {role.num_workers} worker(s) from slot {wanted.first_slot} on, which needs "
                f"{last} slots{each}, but pool {name!r} has {pool.slots} (runtime.options.pools.{name}.slots). Raise "
                "it, or lower the role's ranks or replicas"
            )
        for worker in range(role.num_workers):
            occupants[wanted.first_slot + worker // per_slot[role.name]].append((role, wanted, worker))
    # A role takes the same from each of its slots: its equal share of the most crowded one, over its workers there.
    crowd: dict[str, int] = {}
    on_gpu: dict[str, int] = {}
    for role, _ in guests:
        shared = [{r.name: r for r, _, _ in slot}.values() for slot in occupants if any(r is role for r, _, _ in slot)]
        crowd[role.name] = per_slot[role.name] * max(len(names) for names in shared)
        on_gpu[role.name] = per_slot[role.name] * max(sum(r.wants_gpu for r in names) for names in shared)
    placements: list[WorkerPlacement] = []
    for index, slot in enumerate(occupants):
        here: list[WorkerPlacement] = []
        for role, wanted, worker in slot:
            cpus = wanted.cpus if wanted.cpus is not None else bundle.get("CPU", 0.0) / crowd[role.name]
            gpus = 0.0
            if not is_divided and (wanted.gpus is not None or role.wants_gpu):
                gpus = wanted.gpus if wanted.gpus is not None else pool.gpus / on_gpu[role.name]
            amounts = positive({"CPU": floored(cpus), "GPU": floored(gpus), **wanted.resources})
            here.append(WorkerPlacement(role.name, worker, f"pool {name!r}", index, amounts))
        _check_not_overfull(here, bundle, name, index)
        placements += _with_gpus(here, slot, name, index, int(pool.gpus)) if is_divided else here
    return placements


def _check_gpus(role: PlacedRole, wanted: PlacementOptions, pool: str, of_slot: float) -> None:
    """Raise a ConfigError if a slot cannot give a worker the GPUs that it drives."""
    needed = role.devices_per_worker if role.wants_gpu else 0
    gpus_key = f"runtime.options.roles.{role.name}.gpus"
    if of_slot > 1 and wanted.gpus is not None and (wanted.gpus != int(wanted.gpus) or wanted.gpus < needed):
        raise ConfigError(
            f"{gpus_key} is {wanted.gpus:g}, but a worker of role {role.name!r} in a slot of {of_slot:g} GPUs drives "
            f"whole GPUs{f', {needed} of them' if needed else ''}. Remove the setting: roles that share GPUs take"
            " turns "
            "on them"
        )
    if needed and wanted.gpus is None and needed > max(of_slot, 1.0):
        raise ConfigError(
            f"a worker of role {role.name!r} drives {needed} GPU(s), but a slot of pool {pool!r} has {of_slot:g} "
            f"(runtime.options.pools.{pool}.gpus). Raise it to {needed} or a multiple of it, or let the role's engine "
            "drive fewer; other roles may share these GPUs"
        )
    if needed and wanted.gpus is None and not of_slot:
        raise ConfigError(
            f"a worker of role {role.name!r} is to run on a GPU, but the slots of pool {pool!r} have none. Set "
            f"runtime.options.pools.{pool}.gpus, or roles.{role.name}.device to cpu"
        )


def _workers_per_slot(role: PlacedRole, wanted: PlacementOptions, of_slot: float) -> int:
    """Return the configured number; by default as many workers as a slot with several GPUs has GPUs for."""
    if wanted.per_slot is not None:
        return wanted.per_slot
    drives = _driven_gpus(role, wanted)
    return max(1, int(of_slot) // drives) if of_slot > 1 and drives else 1


def _driven_gpus(role: PlacedRole, wanted: PlacementOptions) -> int:
    """Return the number of GPUs that one worker drives in a slot with several."""
    if wanted.gpus is not None:
        return int(wanted.gpus)
    return role.devices_per_worker if role.wants_gpu else 0


def _check_not_overfull(here: Sequence[WorkerPlacement], bundle: ResourceAmounts, pool: str, index: int) -> None:
    for resource, amount in added(placement.amounts for placement in here).items():
        if amount > bundle.get(resource, 0.0) + TOLERANCE:
            shares = " + ".join(f"{placement.role} {placement.amounts.get(resource, 0.0):g}" for placement in here)
            raise ConfigError(
                f"slot {index} of pool {pool!r} has {bundle.get(resource, 0.0):g} {resource}, but its roles take "
                f"{shares} = {amount:g}. Give the slot more, or the roles less (runtime.options.roles)"
            )


def _with_gpus(
    here: Sequence[WorkerPlacement],
    slot: Sequence[tuple[PlacedRole, PlacementOptions, int]],
    pool: str,
    index: int,
    num_gpus: int,
) -> list[WorkerPlacement]:
    """Assign GPUs to the placements of a slot; a reward takes no turns, so its GPUs are exclusive."""
    driven = [_driven_gpus(role, wanted) for role, wanted, _ in slot]
    demands = [
        GpuDemand(role.name, count, takes_turns=role.kind in ("trainer", "generator"))
        for (role, _, _), count in zip(slot, driven, strict=True)
        if count
    ]
    given = iter(divide_gpus(num_gpus, demands, pool, index))
    return [
        replace(placement, gpus=next(given)) if count else placement
        for placement, count in zip(here, driven, strict=True)
    ]


def placement_between(trainer: RoleSize, generator: RoleSize, options: RayRuntimeOptions) -> Placement:
    """Return how far apart these two roles may be; see ``RayRuntimeOptions.placement_between``."""
    try:
        placement_plan = place_roles([_placed(trainer, options), _placed(generator, options)], options)
    except ConfigError:
        return "anywhere"  # the runtime then refuses it, with the reason
    if placement_plan.on_one_node(trainer.name, generator.name):
        return "host"
    return "hosts" if placement_plan.beside(generator.name, trainer.name) else "anywhere"


def same_gpus_between(trainer: RoleSize, generator: RoleSize, options: RayRuntimeOptions) -> bool:
    """Whether these two are sure to share GPUs: see ``RayRuntimeOptions.same_gpus_between``."""
    try:
        placement_plan = place_roles([_placed(trainer, options), _placed(generator, options)], options)
    except ConfigError:
        return False  # which the runtime refuses, with the reason
    trained, served = (
        {device for placement in placement_plan.of(role.name) for device in placement.devices}
        for role in (trainer, generator)
    )
    return served <= trained and all(device.is_gpu for device in served)


def _placed(role: RoleSize, options: RayRuntimeOptions) -> PlacedRole:
    pool = options.pools.get(options.roles.get(role.name, PlacementOptions()).pool or "")
    device = role.device if role.device != "auto" else "cuda" if pool is not None and pool.gpus else "cpu"
    return PlacedRole(role.name, role.kind, device, role.replicas, role.ranks, devices=role.devices)
