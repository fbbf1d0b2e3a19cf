"""The plan that a runtime builds: roles, their backends, and the routes of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from chatlearn_core.plugins.compatibility import classifies
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
class RewardGate:
    """When a part of a reward role counts. Picklable."""

    part: int
    """Index of the part whose value decides."""
    at_least: float
    """The smallest value of that part, before its weight."""


@dataclass(slots=True, frozen=True)
class BackendPlan:
    """One backend of a role, selected and validated. Picklable: workers on other machines build it by name."""

    key: str
    """Key where the configuration chose it, such as ``roles.generator`` or ``roles.reward.parts.0``."""
    record: TrainerSpec | GeneratorSpec | RewardSpec | EnvironmentSpec
    options: BaseModel
    weight: float = 1.0
    data_sources: frozenset[str] | None = None
    uses: Mapping[str, str] = field(default_factory=dict)
    """For an environment or a reward: handle -> the role that it calls by it."""
    gate: RewardGate | None = None
    """For a part of a reward role."""

    @property
    def unit(self) -> Literal["sample", "group"]:
        """The unit that this reward judges at a time."""
        assert isinstance(self.record, RewardSpec), f"{self.key} is no reward"
        return self.record.unit


@dataclass(slots=True, frozen=True)
class UsedRole:
    """The facts about a role that its caller needs. Picklable."""

    name: str
    kind: str
    model: ModelSource
    weights_change: bool
    """Whether the role is trained, or refreshed from a trained role."""
    classifies: bool = False
    """Whether it is a generator that serves a sequence classifier."""


@dataclass(slots=True, frozen=True)
class Refresh:
    """When and how a trainer role takes another role's weights."""

    role: str
    """The role whose weights are taken."""
    every: int
    """Number of steps between refreshes."""
    decay: float
    """Share kept of the role's own weights."""
    route: WeightRoute | None = None
    """The weight sync that moves them; None: a model directory on a disk that both roles see."""
    why_directory: str = ""
    """The reason why there is no route, for messages."""

    def is_due(self, step: int) -> bool:
        """Whether a refresh is due after this step."""
        return step % self.every == 0


@dataclass(slots=True, frozen=True)
class RolePlan:
    """One role: its backends, numbers of replicas and ranks, and devices."""

    name: str
    kind: str
    backends: tuple[BackendPlan, ...]
    """One, except for a reward that combines several."""
    model: ModelSource | None
    """The model that the role holds; of a reward or an environment the run's model, whose tokenizer it may use."""
    head: Head
    device: str
    replicas: int
    ranks: int
    trainable: bool
    engine: Mapping[str, Any]
    timeout_s: float
    refresh: Refresh | None = None
    total_updates: int | None = None
    """Number of optimizer steps in the whole run; None: the role is not trained."""
    max_turns: int | None = None
    """Maximum number of turns of an environment's rollout; None: no limit."""

    @property
    def holds_a_model(self) -> bool:
        """Whether the role occupies devices: trainers and generators do."""
        return self.kind in ("trainer", "generator")

    @property
    def used_roles(self) -> frozenset[str]:
        """The roles that its backends call."""
        return frozenset(role for backend in self.backends for role in backend.uses.values())

    @property
    def uses(self) -> Mapping[str, str]:
        """For an environment: handle -> generator role."""
        return self.backend.uses

    @property
    def backend(self) -> BackendPlan:
        """The only backend of a trainer, generator or environment."""
        assert len(self.backends) == 1, f"role {self.name} has {len(self.backends)} backends"
        return self.backends[0]

    @property
    def parallel(self) -> dict[Dimension, int]:
        """Number of ranks in each dimension of a trainer with several; ``dp`` is the remainder. Otherwise empty.

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
        """The beginning of messages about values that this role returned."""
        names = " + ".join(repr(backend.record.name) for backend in self.backends)
        return Origin(self.name, f"{self.kind} {names}", self.model.vocab_size if self.model is not None else None)


def origin_of(roles: Mapping[str, RolePlan], role: str, kind: str) -> Origin:
    """The origin of a role's values; a role without a plan is identified by name alone."""
    return roles[role].origin if role in roles else Origin(role, f"a {kind}")


@dataclass(slots=True, frozen=True)
class WeightRoute:
    """One route of weights over a chosen transport: from a trainer role to a generator role, or to a trainer role that
    is refreshed.
    """

    trainer: str
    target: str
    """The role that takes the weights."""
    record: WeightSyncSpec
    options: BaseModel
    why: str
    """Reason for choosing this transport, for the log."""
    fleet_rule: FleetRule
    bucket_bytes: int
    timeout_s: float
    export: Export = "full_tensors"
    """The form in which the trainer streams its weights."""
    channel: Channel = "tensors"
    """The transport's first choice among the channels that the target declares."""
    payload: Payload = "full"
    """``full`` or ``adapter``. A ``delta``, the changes since the last sync, replaces ``full`` if the transport
    supports it and every replica confirmed the last sync (``runtime.sync_planner``)."""
    max_loading: int = 1
    """Under the fleet rule ``rolling``: number of replicas that change their weights at a time."""

    @property
    def form(self) -> str:
        """A sentence on the form in which weights leave the trainer and reach the target."""
        if self.export == "full_tensors":
            return "ranks that hold parts gather whole tensors before they send"
        if self.channel == "boxes":
            return f"each rank sends the boxes that it holds, and {self.target} puts them in their places"
        return (
            f"each rank sends the boxes that it holds, and the receiver makes whole tensors of them for {self.target}"
        )


@dataclass(slots=True, frozen=True)
class RunPlan:
    """Everything a runtime needs."""

    registry: PluginRegistry
    """The driver's plugins, which build the records' objects. Remote workers discover their own, by the same names."""
    roles: Mapping[str, RolePlan]
    weight_syncs: tuple[WeightRoute, ...]
    run_dir: Path
    seed: int

    @property
    def refreshes(self) -> dict[str, Refresh]:
        """Trainer role -> its refresh."""
        return {name: role.refresh for name, role in self.roles.items() if role.refresh is not None}

    def used_by(self, backend: BackendPlan) -> dict[str, UsedRole]:
        """The roles that a backend calls, by its handles."""
        synced = {route.target for route in self.weight_syncs}
        found: dict[str, UsedRole] = {}
        for handle, name in backend.uses.items():
            role = self.roles[name]
            assert role.model is not None, f"role {name} is used, and holds no model"
            changes = name in synced or role.trainable or role.refresh is not None
            record, options = role.backend.record, role.backend.options
            is_classifier = isinstance(record, GeneratorSpec) and classifies(record, options)
            found[handle] = UsedRole(name, role.kind, role.model, changes, is_classifier)
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
