"""Which of the planned roles a run starts."""

from __future__ import annotations

from dataclasses import replace

from chatlearn_core.executor.assembly import Assembly
from chatlearn_core.executor.stages import step_stages
from chatlearn_core.plugins.records import RolloutModeSpec

_PRODUCING = ("generator", "environment", "reward")
"""Kinds of roles that may only make rollouts."""


def started_assembly(assembly: Assembly) -> Assembly:
    """The assembly, whose plan has only the roles that start and the weight syncs between them.

    All do, unless the rollout mode makes no rollouts (``RolloutModeSpec.makes_rollouts``): then a generator, an
    environment or a reward starts only if the consumption stage or an evaluation calls it.
    """
    plan, mode = assembly.plan, assembly.loaded.chosen("rollout")
    if mode is None or not isinstance(mode.record, RolloutModeSpec) or mode.record.makes_rollouts:
        return assembly
    _, nodes = step_stages(assembly.graph, (*assembly.learning.learners, *plan.refreshes))
    called = {role for node in nodes for role in (node.role, *node.uses)}
    for one in assembly.evaluations:
        called |= {role for node in one.graph.nodes for role in (node.role, *node.uses)}
    roles = {name: role for name, role in plan.roles.items() if role.kind not in _PRODUCING or name in called}
    syncs = tuple(sync for sync in plan.weight_syncs if sync.target in roles)
    return replace(assembly, plan=replace(plan, roles=roles, weight_syncs=syncs))
