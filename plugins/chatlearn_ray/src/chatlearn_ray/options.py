"""Options of the runtime ``ray``, under ``runtime.options``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from chatlearn_workers.options import Count, Section, WorkersOptions

if TYPE_CHECKING:
    from chatlearn_core.plugins.compatibility import RoleSize
    from chatlearn_core.plugins.records import Placement

Amount = Annotated[float, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]

NO_ROLE = "none"
"""Value of ``near``: let Ray choose."""


class PoolOptions(Section):
    """A named pool: equal slots, reserved together, for one or several roles."""

    slots: Positive = Field(description="Number of slots; each is on one node.")
    cpus: Amount = Field(1.0, description="CPUs of one slot.")
    gpus: Amount = Field(
        0.0,
        description="GPUs of one slot. With several, each worker gets whole GPUs, which roles share.",
    )
    resources: dict[str, Amount] = Field(default_factory=dict, description="Custom Ray resources of one slot.")
    strategy: Literal["pack", "spread", "one_node", "node_each"] = Field(
        "pack",
        description="pack: few nodes; one_node: exactly one; spread: many nodes; node_each: one per slot.",
    )


class PlacementOptions(Section):
    """Placement of one role, and the resources of each of its workers."""

    pool: str | None = Field(
        None, description="A pool of runtime.options.pools; by default the role gets its own places."
    )
    first_slot: Count = Field(0, description="Slot of its first worker in the pool; overlapping roles share devices.")
    cpus: Amount | None = Field(
        None, description="CPUs per worker; by default 1, or an equal share of the pool's slot."
    )
    gpus: Amount | None = Field(
        None,
        description="GPUs per worker, possibly a fraction; by default what it drives on cuda, or an equal share of "
        "a slot with one GPU. In a slot with several, a whole number.",
    )
    resources: dict[str, Amount] = Field(default_factory=dict, description="Custom Ray resources per worker.")
    per_slot: Positive | None = Field(
        None,
        description="Workers in one slot of the pool; by default 1, or in a slot with several GPUs as many as it has "
        "GPUs for.",
    )
    one_node: bool = Field(False, description="Keep all ranks of a replica on one node.")
    together: Positive | None = Field(
        None, description="Number of consecutive ranks on one node; by default those that communicate in every layer."
    )
    near: str | None = Field(
        None, description="Role on whose nodes to place it, or none; by default a generator's trainer."
    )


class RayRuntimeOptions(WorkersOptions):
    """Options of the runtime ``ray``."""

    address: str | None = Field(
        None,
        description="null: start Ray on this machine, or join the cluster of RAY_ADDRESS (ray job submit sets it); "
        "auto or host:port: join a running cluster.",
    )
    token_file: str | None = Field(
        None,
        description="File with the token of the cluster to join, as given to chatlearn cluster up; by default "
        "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token.",
    )
    num_cpus: Positive | None = Field(
        None,
        description="Logical CPUs of a Ray started here; by default the machine's, or more if roles request more.",
    )
    num_gpus: Count | None = Field(None, description="GPUs of a Ray started here; by default the machine's.")
    object_store_mb: Positive | None = Field(
        None, description="Object store size in MiB of a Ray started here; by default Ray's own choice."
    )
    temp_dir: str | None = Field(None, description="Session directory of a Ray started here; /tmp/ray by default.")
    working_dir: str | None = Field(
        None,
        description="Directory to upload to every node, for code that other machines lack; by default workers use the "
        "driver's directory where it exists.",
    )
    ship_code: bool = Field(
        True,
        description="Send the Python files of the current directory to workers on machines that lack them.",
    )
    pools: dict[str, PoolOptions] = Field(default_factory=dict, description="Named resource pools.")
    roles: dict[str, PlacementOptions] = Field(default_factory=dict, description="Placement of roles, by role name.")
    resource_wait_s: Annotated[float, Field(ge=0)] = Field(
        300.0,
        description="Seconds to wait for a cluster's resources; with a Ray started here, a shortage fails at once.",
    )

    @field_validator("roles")
    @classmethod
    def _name_what_is_there(
        cls, placements: dict[str, PlacementOptions], info: ValidationInfo
    ) -> dict[str, PlacementOptions]:
        pools = info.data.get("pools", {})
        known = (info.context or {}).get("roles")
        for name, placement in placements.items():
            if placement.pool is not None and placement.pool not in pools:
                raise ValueError(
                    f"{name}.pool is {placement.pool!r}, but runtime.options.pools has {_listed(pools)}; define it "
                    "there, or remove the setting"
                )
            if known is not None and name not in known:
                raise ValueError(
                    f"{name!r} is not a role of the configuration, which has {_listed(known)}; rename or remove it"
                )
            if known is not None and placement.near not in (None, NO_ROLE, *known):
                raise ValueError(
                    f"{name}.near is {placement.near!r}; it must be {NO_ROLE!r} or one of {_listed(known)}"
                )
        return placements

    @property
    def cluster_address(self) -> str | None:
        """Address of the cluster to join; None if Ray is started here."""
        return self.address or os.environ.get("RAY_ADDRESS") or None

    @property
    def placement(self) -> Literal["host", "anywhere"]:
        """How far apart roles may be.

        A Ray started here has one node, and so has a pool with one slot or one node that all configured roles share.
        (The runtime refuses a role outside of it that takes part in a weight sync.)
        """
        pools = {placement.pool for placement in self.roles.values()}
        name = pools.pop() if len(self.roles) > 1 and len(pools) == 1 else None
        pool = self.pools.get(name) if name is not None else None
        one_node = pool is not None and (pool.slots == 1 or pool.strategy == "one_node")
        return "host" if self.cluster_address is None or one_node else "anywhere"

    def placement_between(self, trainer: RoleSize, generator: RoleSize) -> Placement:
        """How far apart these two roles may be: roles that share a pool's slots are together on every node of it."""
        pools = {self.roles.get(name, PlacementOptions()).pool for name in (trainer.name, generator.name)}
        if self.placement == "host" or len(pools) > 1 or None in pools:
            return self.placement
        from chatlearn_ray.placement import placement_between  # imported here, because listing plugins does not need it

        return placement_between(trainer, generator, self)

    def same_gpus_between(self, trainer: RoleSize, generator: RoleSize) -> bool:
        """Whether these two share the GPUs of a pool's slots: each GPU of an engine has a rank of the trainer."""
        pools = {self.roles.get(name, PlacementOptions()).pool for name in (trainer.name, generator.name)}
        if len(pools) > 1 or None in pools:
            return False
        from chatlearn_ray.placement import same_gpus_between  # not needed to list plugins, and less light

        return same_gpus_between(trainer, generator, self)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"
