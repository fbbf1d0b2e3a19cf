"""What a runtime has to build: roles, their backends, and which weights flow where."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from chatlearn_core.plugins.records import (
    Channel,
    Dimension,
    EnvironmentSpec,
    Export,
    GeneratorSpec,
    RewardSpec,
    TrainerSpec,
    WeightSyncSpec,
)
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import Head, ModelSource, RoleContext
from chatlearn_core.runtime.boundary import Origin
from chatlearn_core.types import FleetRule, Payload


@dataclass(slots=True, frozen=True)
class BackendPlan:
    """One backend of a role, chosen and validated. Picklable: workers on other machines build from it by name."""

    key: str
    """Where the configuration chose it, such as ``roles.generator`` or ``roles.reward.parts.0``."""
    record: TrainerSpec | GeneratorSpec | RewardSpec | EnvironmentSpec
    options: BaseModel
    weight: float = 1.0
    data_sources: frozenset[str] | None = None
    uses: Mapping[str, str] = field(default_factory=dict)
    """Of an environment or a reward: handle -> the role that it calls by it."""

    @property
    def unit(self) -> Literal["sample", "group"]:
        """The least that this reward judges at a time."""
        assert isinstance(self.record, RewardSpec), f"{self.key} is no reward"
        return self.record.unit


@dataclass(slots=True, frozen=True)
class UsedRole:
    """A role as one that calls it knows it. Picklable."""

    name: str
    kind: str
    model: ModelSource
    weights_change: bool
    """Whether it learns, or takes weights of a role that does."""


@dataclass(slots=True, frozen=True)
class Refresh:
    """When a trainer role takes another's weights."""

    role: str
    """The other."""
    every: int
    """Steps."""
    decay: float
    """Share that stays of its own weights."""

    def is_due(self, step: int) -> bool:
        """Whether it happens after this step."""
        return step % self.every == 0


@dataclass(slots=True, frozen=True)
class RolePlan:
    """One role: how many, of what, on what."""

    name: str
    kind: str
    backends: tuple[BackendPlan, ...]
    """One, except for a reward that combines several."""
    model: ModelSource | None
    head: Head
    device: str
    replicas: int
    ranks: int
    trainable: bool
    engine: Mapping[str, Any]
    timeout_s: float
    refresh: Refresh | None = None
    total_updates: int | None = None
    """Optimizer steps of the whole run; None: it does not learn."""

    @property
    def holds_a_model(self) -> bool:
        """Whether it occupies devices: trainers and generators do."""
        return self.kind in ("trainer", "generator")

    @property
    def used_roles(self) -> frozenset[str]:
        """The roles that its backends call."""
        return frozenset(role for backend in self.backends for role in backend.uses.values())

    @property
    def uses(self) -> Mapping[str, str]:
        """Of an environment: handle -> generator role."""
        return self.backend.uses

    @property
    def backend(self) -> BackendPlan:
        """The only backend of a trainer, generator or environment."""
        assert len(self.backends) == 1, f"role {self.name} has {len(self.backends)} backends"
        return self.backends[0]

    @property
    def parallel(self) -> dict[Dimension, int]:
        """Ranks of each dimension of a trainer that has several; ``dp`` is what the others leave. Else empty.

        Example:
            ``{"dp": 2, "tp": 4}`` on 8 ranks.
        """
        if self.kind != "trainer" or self.ranks == 1:
            return {}
        record = self.backend.record
        assert isinstance(record, TrainerSpec)
        options: dict[str, Any] = self.backend.options.model_dump()
        sizes: dict[Dimension, int] = {}
        for dimension, option in record.parallel.items():
            size = options.get(option)
            if dimension != "dp" and isinstance(size, int) and not isinstance(size, bool) and size > 1:
                sizes[dimension] = size
        others = math.prod(size for dimension, size in sizes.items() if dimension != "ep")
        return {"dp": max(1, self.ranks // others), **sizes}

    @property
    def origin(self) -> Origin:
        """What messages about something that this role returned begin with."""
        names = " + ".join(repr(backend.record.name) for backend in self.backends)
        return Origin(self.name, f"{self.kind} {names}", self.model.vocab_size if self.model is not None else None)


def origin_of(roles: Mapping[str, RolePlan], role: str, kind: str) -> Origin:
    """Whose values a role returns; a role that no plan knows is named alone."""
    return roles[role].origin if role in roles else Origin(role, f"a {kind}")


@dataclass(slots=True, frozen=True)
class WeightRoute:
    """One flow of weights: from a trainer role to a generator role, over a chosen transport."""

    trainer: str
    generator: str
    record: WeightSyncSpec
    options: BaseModel
    why: str
    """Why this transport, for the log."""
    fleet_rule: FleetRule
    bucket_bytes: int
    timeout_s: float
    export: Export = "full_tensors"
    """The form in which the trainer streams its weights."""
    channel: Channel = "tensors"
    """The transport's first choice among the channels that the generator declares."""
    payload: Payload = "full"
    """``full`` or ``adapter``. What changed since the last sync (``delta``) is sent in place of ``full`` where the
    transport can and every replica confirmed the last one (``runtime.sync_planner``)."""
    max_loading: int = 1
    """Under the fleet rule ``rolling``: how many replicas change their weights at a time."""

    @property
    def form(self) -> str:
        """In what form weights leave the trainer and reach the generator, for people."""
        if self.export == "full_tensors":
            return "ranks that hold parts gather whole tensors before they send"
        if self.channel == "boxes":
            return "each rank sends the boxes that it holds, and the generator puts them in their places"
        return "each rank sends the boxes that it holds, and the receiver makes whole tensors of them for the generator"


@dataclass(slots=True, frozen=True)
class RunPlan:
    """Everything a runtime needs."""

    registry: PluginRegistry
    """The driver's plugins, to build what a record names. Workers elsewhere discover their own, by the same names."""
    roles: Mapping[str, RolePlan]
    weight_syncs: tuple[WeightRoute, ...]
    run_dir: Path
    seed: int

    @property
    def refreshes(self) -> dict[str, Refresh]:
        """Trainer role -> when it takes another's weights."""
        return {name: role.refresh for name, role in self.roles.items() if role.refresh is not None}

    def used_by(self, backend: BackendPlan) -> dict[str, UsedRole]:
        """The roles that a backend calls, by its handles."""
        synced = {route.generator for route in self.weight_syncs}
        found: dict[str, UsedRole] = {}
        for handle, name in backend.uses.items():
            role = self.roles[name]
            assert role.model is not None, f"role {name} is used, and holds no model"
            changes = name in synced or role.trainable or role.refresh is not None
            found[handle] = UsedRole(name, role.kind, role.model, changes)
        return found

    def context(self, role: RolePlan, *, replica: int = 0, rank: int = 0, device: str = "cpu") -> RoleContext:
        """The context of one rank of one replica."""
        return RoleContext(
            role=role.name,
            model=role.model,
            replica=replica,
            rank=rank,
            world_size=role.ranks,
            device=device,
            seed=self.seed,
            trainable=role.trainable,
            total_updates=role.total_updates,
            engine_arguments=dict(role.engine),
        )
