"""Device sharing: which roles share memory and which parts must move when, derived from roles, devices and the flow
before anything runs. Pure functions.

Roles that share a device take turns on it. After a move the shared devices hold exactly the parts that the next use
needs: the optimizer only for updates and checkpoints, the KV cache only while tokens are sampled, and both models only
while weights are synced. Roles without shared devices are never moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.stages import step_stages
from chatlearn_core.flow import Graph, Node
from chatlearn_core.protocols import MEMORY_PARTS, Device, MemoryAction, MemoryPart
from chatlearn_core.runtime.plan import RolePlan, RunPlan

OffloadMode = Literal["auto", "always", "never"]
Method = Literal["generate", "compute", "update", "load", "save", "export", "send", "receive"]
NEEDS: Mapping[Method, frozenset[MemoryPart]] = {
    "generate": frozenset({"weights", "kv_cache"}),
    "compute": frozenset({"weights"}),
    "update": frozenset({"weights", "gradients", "optimizer"}),
    "load": frozenset({"weights", "optimizer"}),
    "save": frozenset({"weights", "optimizer"}),
    "export": frozenset({"weights"}),
    "send": frozenset({"weights"}),
    "receive": frozenset({"weights"}),
}
"""The parts that a role must have on its device for each kind of use."""
Held = Mapping[str, Mapping[MemoryPart, bool | None]]
"""Role -> part -> whether the part is on the device; None if unknown after a failure."""


@dataclass(slots=True, frozen=True)
class DeviceUse:
    """One use of a role's devices."""

    role: str
    method: Method


@dataclass(slots=True, frozen=True)
class Move:
    """Parts of one role that are moved together."""

    action: MemoryAction
    role: str
    parts: tuple[MemoryPart, ...]

    def __str__(self) -> str:
        return f"{self.action} {self.role} ({', '.join(self.parts)})"


@dataclass(slots=True, frozen=True)
class Sharing:
    """The roles that take turns on devices. Roles not listed have their devices to themselves, or are never moved."""

    devices: Mapping[str, frozenset[Device]] = field(default_factory=dict)
    """The devices that each role shares with another."""
    parts: Mapping[str, tuple[MemoryPart, ...]] = field(default_factory=dict)
    """The parts that each role holds."""

    def contested(self, uses: Sequence[DeviceUse]) -> frozenset[Device]:
        """The shared devices that these uses need."""
        return frozenset().union(*(self.devices.get(use.role, frozenset()) for use in uses))

    def affected(self, uses: Sequence[DeviceUse]) -> list[str]:
        """The roles whose parts may have to move before ``uses``."""
        wanted, used = self.contested(uses), {use.role for use in uses}
        return [role for role in self.parts if role in used or self.devices[role] & wanted]

    def moves(self, uses: Sequence[DeviceUse], held: Held) -> list[Move]:
        """The moves needed before the concurrent ``uses`` may begin: first all offloads, then the onloads in the order
        of ``uses``.
        """
        needed: dict[str, frozenset[MemoryPart]] = {}
        for use in uses:
            needed[use.role] = needed.get(use.role, frozenset()) | NEEDS[use.method]
        found: list[Move] = []
        for role in self.affected(uses):
            leaving = [p for p in self.parts[role] if held[role][p] is not False and p not in needed.get(role, ())]
            found += _move("offload", role, leaving)
        for role in needed:
            coming = [p for p in self.parts.get(role, ()) if held[role][p] is not True and p in needed[role]]
            found += _move("onload", role, coming)
        return found

    def check_kept(self, setting: str, generators: Iterable[str]) -> None:
        """Raises ConfigError if ``setting`` keeps requests in a KV cache of these generators that is released."""
        for generator in generators:
            guests = [role for role in self.parts if role != generator and self._meet(role, generator)]
            if guests:
                raise ConfigError(
                    f"{setting} leaves unfinished completions in the KV cache of roles.{generator}, but that memory is "
                    f"released for {', '.join(f'roles.{role}' for role in guests)} on the same devices "
                    "(memory.offload). Resume them from their tokens (rollout.partial: resume), give the"
                    " generator its own devices, or set memory.offload to never"
                )

    def _meet(self, one: str, other: str) -> bool:
        return bool(self.devices.get(one, frozenset()) & self.devices.get(other, frozenset()))


def find_sharing(roles: Mapping[str, RolePlan], devices: Mapping[str, frozenset[Device]], mode: OffloadMode) -> Sharing:
    """Find the roles that take turns on devices.

    Args:
        devices: devices of each role that has some, as stated by the runtime.
        mode: ``auto`` considers only the memory of GPUs, ``always`` also that of CPUs.
    """
    minded = {
        name: frozenset(d for d in devices.get(name, ()) if mode == "always" or (mode == "auto" and d.is_gpu))
        for name, role in roles.items()
        if role.holds_a_model
    }
    shared: dict[str, frozenset[Device]] = {}
    for name, own in minded.items():
        others = frozenset().union(*(theirs for other, theirs in minded.items() if other != name))
        if own & others:
            shared[name] = own & others
    return Sharing(shared, {name: held_parts(roles[name]) for name in shared})


def held_parts(role: RolePlan) -> tuple[MemoryPart, ...]:
    """The parts that a role holds: a trainer that is not trained has only weights."""
    if role.kind == "generator":
        return ("weights", "kv_cache")
    return ("weights", "gradients", "optimizer") if role.trainable else ("weights",)


def uses_of(node: Node, roles: Mapping[str, RolePlan]) -> list[DeviceUse]:
    """The device uses of a flow's call: those of its role and of the roles that this role calls. Functions, and rewards
    that call no role, have none.
    """
    kinds = {role: roles[role].kind for role in node.uses} | {node.role: node.kind}
    methods: dict[str, Method] = {"generator": "generate", "trainer": "compute"}
    return [DeviceUse(role, methods[kind]) for role, kind in sorted(kinds.items()) if kind in methods]


@dataclass(slots=True, frozen=True)
class ScheduledDeviceUse:
    """A use that occurs in every step, and the moves right before it."""

    name: str
    level: int | None
    """Depth in the flow's graph; None for uses after the flow."""
    moves: tuple[Move, ...]


def schedule(sharing: Sharing, plan: RunPlan, graph: Graph, learners: Sequence[str]) -> list[ScheduledDeviceUse]:
    """The uses of one step in order, in a running run: a step without evaluation and checkpoint."""
    uses: list[tuple[str, int | None, list[DeviceUse]]] = []
    stages = step_stages(graph, (*learners, *plan.refreshes))
    by_level = [(node, level) for level, nodes in enumerate(graph.levels) for node in nodes]
    calls = [(node, level, uses_of(node, plan.roles)) for stage in stages for node, level in by_level if node in stage]
    uses += [(node.name, level, of_node) for node, level, of_node in calls if of_node]
    uses += [(f"{role}.update", None, [DeviceUse(role, "update")]) for role in learners]
    uses += [(f"sync {s.trainer} -> {s.target}", None, sync_uses(s.trainer, s.target)) for s in plan.weight_syncs]
    held: dict[str, dict[MemoryPart, bool | None]] = {
        role: dict.fromkeys(parts, False) for role, parts in sharing.parts.items()
    }
    steps: list[ScheduledDeviceUse] = []
    for _ in range(2):  # the first round is the state at the start of a run
        steps = []
        for name, level, together in uses:
            moves = sharing.moves(together, held)
            for move in moves:
                held[move.role].update(dict.fromkeys(move.parts, move.action == "onload"))
            steps.append(ScheduledDeviceUse(name, level, tuple(moves)))
    return steps


def sync_uses(trainer: str, generator: str) -> list[DeviceUse]:
    """A weight sync needs only the weights of both ends."""
    return [DeviceUse(trainer, "send"), DeviceUse(generator, "receive")]


def _move(action: MemoryAction, role: str, parts: Sequence[MemoryPart]) -> list[Move]:
    return [Move(action, role, tuple(p for p in MEMORY_PARTS if p in parts))] if parts else []
