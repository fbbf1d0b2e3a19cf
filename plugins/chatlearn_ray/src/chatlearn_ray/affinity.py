"""Derives from plugin records, options and transports which workers should be placed together. Pure functions."""

from __future__ import annotations

import math
from typing import Any

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.records import Dimension, GeneratorSpec
from chatlearn_core.runtime.plan import RolePlan, RunPlan, WeightRoute
from chatlearn_ray.options import PlacementOptions, RayRuntimeOptions
from chatlearn_ray.placement import PlacedRole, PlacementPlan

IN_EVERY_LAYER: tuple[Dimension, ...] = ("tp", "cp", "sp", "ep")
"""Dimensions whose ranks exchange activations in every layer."""


def placed_role(role: RolePlan, plan: RunPlan, options: RayRuntimeOptions, *, gpus: bool) -> PlacedRole:
    """Return the properties of a role that determine its placement.

    Args:
        role: the role's plan.
        plan: the run's plan.
        options: options of the runtime.
        gpus: whether ``device: auto`` means a GPU; a role to which the configuration gives GPUs uses one in any case.

    Raises:
        ConfigError: the device must be chosen by Ray, or an engine has two different numbers of devices.
    """
    device = role.device
    if role.holds_a_model:
        if device == "auto":
            device = "cuda" if gpus or _is_given_gpus(role.name, options) else "cpu"
        elif device.startswith("cuda:"):
            raise ConfigError(
                f"roles.{role.name}.device is {device!r}, but the runtime 'ray' assigns devices itself. Set it to cuda"
            )
    together, together_why = ranks_together(role)
    near, near_why = next_to(role, plan, options)
    return PlacedRole(
        role.name,
        role.kind,
        device,
        role.replicas,
        role.ranks,
        engine_devices(role),
        together,
        together_why,
        near,
        near_why,
    )


def _is_given_gpus(role: str, options: RayRuntimeOptions) -> bool:
    placement = options.roles.get(role, PlacementOptions())
    if placement.gpus is not None:
        return placement.gpus > 0
    return placement.pool in options.pools and options.pools[placement.pool].gpus > 0


def engine_devices(role: RolePlan) -> int | None:
    """Return the number of devices of one generator replica, from its engine arguments; None if they do not say.

    Raises:
        ConfigError: the number differs from ``ranks``.
    """
    if role.kind != "generator":
        return None
    record = role.backend.record
    assert isinstance(record, GeneratorSpec)
    given = {name: role.engine[name] for names in record.device_arguments for name in names if name in role.engine}
    if not given:
        return None
    devices = math.prod(_positive(role, name, value) for name, value in given.items())
    if role.ranks not in (1, devices):
        product = " x ".join(f"{name} {value}" for name, value in given.items())
        raise ConfigError(
            f"roles.{role.name}.ranks is {role.ranks}, but roles.{role.name}.engine uses {devices} ({product}). Leave "
            "ranks out, or make them agree"
        )
    return devices


def _positive(role: RolePlan, name: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ConfigError(f"roles.{role.name}.engine.{name} is {value!r}; it must be a whole number, 1 or more")


def ranks_together(role: RolePlan) -> tuple[int, str]:
    """Return how many consecutive ranks of a trainer belong on one node, and why."""
    if role.kind != "trainer":
        return 1, ""
    sizes = role.parallel
    near = {dimension: sizes[dimension] for dimension in IN_EVERY_LAYER if dimension in sizes}
    reason = ", ".join(f"{dimension} {size}" for dimension, size in near.items())
    # An expert group consists of ranks of the other dimensions and of data parallelism.
    return max(math.prod(size for dimension, size in near.items() if dimension != "ep"), near.get("ep", 1)), reason


def next_to(role: RolePlan, plan: RunPlan, options: RayRuntimeOptions) -> tuple[str | None, str]:
    """Return the role next to which a role should be placed, and why. On one machine there is no choice."""
    if options.cluster_address is None:
        return None, ""
    for sync in plan.weight_syncs:
        if sync.target == role.name and "checkpoint" not in sync.record.channels:
            return sync.trainer, f"{sync.record.name!r} moves weights between them, faster within a node"
    return None, ""


def check_reach(sync: WeightRoute, placement_plan: PlacementPlan, options: RayRuntimeOptions) -> None:
    """Raise a ConfigError for a transport that reaches only one host, between roles that may be on several."""
    if sync.record.reach != "host" or options.cluster_address is None:
        return
    if placement_plan.on_one_node(sync.trainer, sync.target):
        return
    if sync.record.within_hosts and placement_plan.beside(sync.target, sync.trainer):
        return
    beside = ", or let every replica of the generator sit in a slot with ranks of the trainer"
    raise ConfigError(
        f"the transport {sync.record.name!r} works within one host, but the places of {sync.trainer!r} and "
        f"{sync.target!r} may be on several. Put both in one pool with strategy: one_node, "
        f"or one slot (runtime.options.pools){beside if sync.record.within_hosts else ''}, or choose another "
        "weight_sync.backend"
    )
