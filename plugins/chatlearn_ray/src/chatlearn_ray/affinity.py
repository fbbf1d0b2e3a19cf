"""What of a plan says where workers gain to sit: from plugin records, options and transports. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.records import GeneratorSpec, TrainerSpec
from chatlearn_core.runtime.plan import RolePlan, RunPlan, WeightSyncPlan
from chatlearn_ray.options import RayRuntimeOptions, SeatOptions
from chatlearn_ray.seating import SeatedRole, Seating


def seated_role(role: RolePlan, plan: RunPlan, options: RayRuntimeOptions, *, gpus: bool) -> SeatedRole:
    """What of a role matters for its place.

    Args:
        gpus: whether ``device: auto`` is a GPU; where the configuration gives the role some, it is one anyway.

    Raises:
        ConfigError: a device that Ray must choose, or two numbers of devices for one engine.
    """
    device = role.device
    if role.kind != "reward":
        if device == "auto":
            device = "cuda" if gpus or _is_given_gpus(role.name, options) else "cpu"
        elif device.startswith("cuda:"):
            raise ConfigError(
                f"roles.{role.name}.device is {device!r}, but the runtime 'ray' hands out devices itself. Set it to "
                "cuda"
            )
    together, together_why = ranks_together(role)
    near, near_why = next_to(role, plan, options)
    return SeatedRole(
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
    seat = options.roles.get(role, SeatOptions())
    if seat.gpus is not None:
        return seat.gpus > 0
    return seat.pool in options.pools and options.pools[seat.pool].gpus > 0


def engine_devices(role: RolePlan) -> int | None:
    """Devices of one replica of a generator by its engine arguments; None where these say nothing.

    Raises:
        ConfigError: they say another number than ``ranks``.
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
            f"roles.{role.name}.ranks is {role.ranks}, but roles.{role.name}.engine makes {devices} ({product}). Leave "
            "ranks out, or make them agree"
        )
    return devices


def _positive(role: RolePlan, name: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ConfigError(f"roles.{role.name}.engine.{name} is {value!r}; it must be a whole number, 1 or more")


def ranks_together(role: RolePlan) -> tuple[int, str]:
    """How many consecutive ranks of a trainer belong on one node, and why."""
    if role.kind != "trainer":
        return 1, ""
    record = role.backend.record
    assert isinstance(record, TrainerSpec)
    options: Mapping[str, Any] = role.backend.options.model_dump()
    sizes = {name: options[name] for name in record.node_options if isinstance(options.get(name), int)}
    reason = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return math.prod(sizes.values()), reason


def next_to(role: RolePlan, plan: RunPlan, options: RayRuntimeOptions) -> tuple[str | None, str]:
    """The role next to which a role gains to sit, and why. On one machine everything is next to everything."""
    if options.cluster_address is None:
        return None, ""
    for sync in plan.weight_syncs:
        if sync.generator == role.name and sync.record.channels != ("checkpoint",):
            return sync.trainer, f"{sync.record.name!r} moves weights between them, which is faster within a node"
    return None, ""


def check_reach(sync: WeightSyncPlan, seating: Seating, options: RayRuntimeOptions) -> None:
    """Raises ConfigError: a transport that reaches one host only, between roles that may be on several."""
    if sync.record.reach != "host" or options.cluster_address is None:
        return
    if seating.on_one_node(sync.trainer, sync.generator):
        return
    if sync.record.within_hosts and seating.beside(sync.generator, sync.trainer):
        return
    beside = ", or let every replica of the generator sit in a slot with ranks of the trainer"
    raise ConfigError(
        f"the transport {sync.record.name!r} works within one host, but the places of {sync.trainer!r} and "
        f"{sync.generator!r} may be on several. Put both in one pool with strategy: one_node, "
        f"or one slot (runtime.options.pools){beside if sync.record.within_hosts else ''}, or choose another "
        "weight_sync.backend"
    )
