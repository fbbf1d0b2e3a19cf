"""Who shares memory, and what has to move when: derived from roles, devices and the flow before anything runs. Pure.

Roles that share a device take turns on it. After a move the shared devices hold exactly what the next use needs: the
optimizer only for updates and checkpoints, the KV cache only while tokens are sampled, both models while weights are
sent from one to the other. A role that shares no device is never moved.
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
"""Which parts a role must have on its device for what it is used for."""
Held = Mapping[str, Mapping[MemoryPart, bool | None]]
"""Role -> part -> whether it is on the device; None where that is not known, after something failed."""


@dataclass(slots=True, frozen=True)
class DeviceUse:
    """What a role is about to do."""

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
    """The roles that take turns. A role that is not in it has its devices to itself, or is never moved."""

    devices: Mapping[str, frozenset[Device]] = field(default_factory=dict)
    """The devices of each that another one sits on too."""
    parts: Mapping[str, tuple[MemoryPart, ...]] = field(default_factory=dict)
    """What each holds."""

    def contested(self, uses: Sequence[DeviceUse]) -> frozenset[Device]:
        """The shared devices that these uses need."""
        return frozenset().union(*(self.devices.get(use.role, frozenset()) for use in uses))

    def affected(self, uses: Sequence[DeviceUse]) -> list[str]:
        """The roles of which parts may have to be moved before ``uses``."""
        wanted, used = self.contested(uses), {use.role for use in uses}
        return [role for role in self.parts if role in used or self.devices[role] & wanted]

    def moves(self, uses: Sequence[DeviceUse], held: Held) -> list[Move]:
        """What has to happen before ``uses``, all at the same time, may begin: first everything that is in the way
        leaves, then what is needed comes, in the order of ``uses``.
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
        """Raises ConfigError: ``setting`` keeps requests in the KV cache of one of these, which is released."""
        for generator in generators:
            guests = [role for role in self.parts if role != generator and self._meet(role, generator)]
            if guests:
                raise ConfigError(
                    f"{setting} leaves unfinished completions in the KV cache of roles.{generator}, but that memory is "
                    f"released for {', '.join(f'roles.{role}' for role in guests)} on the same devices "
                    "(memory.offload). Resume them from their tokens (rollout.partial: resume), give the generator "
                    "devices of its own, or set memory.offload to never"
                )

    def _meet(self, one: str, other: str) -> bool:
        return bool(self.devices.get(one, frozenset()) & self.devices.get(other, frozenset()))


def find_sharing(roles: Mapping[str, RolePlan], devices: Mapping[str, frozenset[Device]], mode: OffloadMode) -> Sharing:
    """Who takes turns.

    Args:
        devices: of each role that has some, as the runtime tells.
        mode: ``auto`` minds the memory of GPUs only, ``always`` that of CPUs too.
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
    """What a role holds: a trainer that does not learn has weights only."""
    if role.kind == "generator":
        return ("weights", "kv_cache")
    return ("weights", "gradients", "optimizer") if role.trainable else ("weights",)


def uses_of(node: Node, roles: Mapping[str, RolePlan]) -> list[DeviceUse]:
    """What a call of the flow does with memory: that of its role, and of the roles which that one calls. A reward that
    calls none, and a function, use none.
    """
    kinds = {role: roles[role].kind for role in node.uses} | {node.role: node.kind}
    methods: dict[str, Method] = {"generator": "generate", "trainer": "compute"}
    return [DeviceUse(role, methods[kind]) for role, kind in sorted(kinds.items()) if kind in methods]


@dataclass(slots=True, frozen=True)
class ScheduledDeviceUse:
    """Something that happens in every step, and what moves right before."""

    name: str
    level: int | None
    """Depth in the flow's graph; None for what comes after it."""
    moves: tuple[Move, ...]


def schedule(sharing: Sharing, plan: RunPlan, graph: Graph, learners: Sequence[str]) -> list[ScheduledDeviceUse]:
    """The uses of one step in their order, once the run is under way: a step without evaluation and checkpoint."""
    uses: list[tuple[str, int | None, list[DeviceUse]]] = []
    stages = step_stages(graph, (*learners, *plan.refreshes))
    by_level = [(node, level) for level, nodes in enumerate(graph.levels) for node in nodes]
    calls = [(node, level, uses_of(node, plan.roles)) for stage in stages for node, level in by_level if node in stage]
    uses += [(node.name, level, of_node) for node, level, of_node in calls if of_node]
    uses += [(f"{role}.update", None, [DeviceUse(role, "update")]) for role in learners]
    uses += [(f"sync {s.trainer} -> {s.generator}", None, sync_uses(s.trainer, s.generator)) for s in plan.weight_syncs]
    held: dict[str, dict[MemoryPart, bool | None]] = {
        role: dict.fromkeys(parts, False) for role, parts in sharing.parts.items()
    }
    steps: list[ScheduledDeviceUse] = []
    for _ in range(2):  # the first round is how a run begins
        steps = []
        for name, level, together in uses:
            moves = sharing.moves(together, held)
            for move in moves:
                held[move.role].update(dict.fromkeys(move.parts, move.action == "onload"))
            steps.append(ScheduledDeviceUse(name, level, tuple(moves)))
    return steps


def sync_uses(trainer: str, generator: str) -> list[DeviceUse]:
    """A weight sync needs the weights of both ends, and nothing else."""
    return [DeviceUse(trainer, "send"), DeviceUse(generator, "receive")]


def describe_sharing(sharing: Sharing, steps: Sequence[ScheduledDeviceUse]) -> list[str]:
    """Lines for people: who takes turns where, and what moves when."""
    if not sharing.devices:
        return ["nothing is moved: no two roles share memory, or memory.offload leaves them in it"]
    lines = []
    shared: dict[str, list[Device]] = {}
    for device in sorted(frozenset().union(*sharing.devices.values())):
        guests = ", ".join(role for role, own in sharing.devices.items() if device in own)
        shared.setdefault(guests, []).append(device)
    for guests, (first, *others) in shared.items():
        more = f" and {len(others)} more, up to {others[-1].place}" if others else ""
        lines.append(f"{guests} take turns on {first.place}{more}")
    lines += [f"before {step.name:<24} {'; '.join(map(str, step.moves)) or 'nothing moves'}" for step in steps]
    return lines


def _move(action: MemoryAction, role: str, parts: Sequence[MemoryPart]) -> list[Move]:
    return [Move(action, role, tuple(p for p in MEMORY_PARTS if p in parts))] if parts else []
