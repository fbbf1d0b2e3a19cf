"""Evaluation without training: of the model in a directory, and of a run's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from chatlearn_core.config.recorded import recorded_values
from chatlearn_core.exceptions import CheckpointError, ConfigError
from chatlearn_core.executor.assembly import Assembly
from chatlearn_core.executor.checkpoint import Checkpoint
from chatlearn_core.executor.component_factory import LoopParts, build_colocation, build_evaluators, build_runtime
from chatlearn_core.executor.device_sharing import DeviceUse
from chatlearn_core.executor.metrics_line import values
from chatlearn_core.executor.resume import MAY_CHANGE, changed_settings, is_of, layout_settings
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.weight_sync_manager import WeightSyncManager
from chatlearn_core.metrics import Timers
from chatlearn_core.plugins.observers import Observers
from chatlearn_core.runtime.plan import RunPlan, WeightRoute


async def evaluate_model(assembly: Assembly) -> dict[str, float]:
    """Start only the roles of the evaluation and evaluate once; returns the ``eval/...`` metrics.

    Raises:
        ConfigError: the configuration has no eval dataset.
    """
    if not assembly.evaluations:
        raise ConfigError(f"{assembly.loaded.source}: data.eval is empty; add a dataset to evaluate on")
    alone = _with_roles(assembly, _called(assembly), ())
    runtime = build_runtime(alone)
    rollouts = Rollouts(runtime, assembly.config.rollout, alone.plan.roles)
    parts = LoopParts(alone, runtime, rollouts)
    evaluators = build_evaluators(parts)
    assert evaluators is not None, "there is an eval dataset"
    try:
        await runtime.start()
        metrics, _ = await evaluators.evaluate(Timers())
    finally:
        parts.close()
        await runtime.close()
    return values(metrics)


async def evaluate_checkpoints(
    assembly: Assembly, checkpoints: Sequence[Checkpoint], told: Callable[[Checkpoint, dict[str, float]], None]
) -> None:
    """Evaluate checkpoints of a run, one after another, with roles that are started once: the trained roles load each
    checkpoint and sync its weights to the generators, as a run does that resumes from it.

    Args:
        assembly: of the run's configuration; the eval datasets and the section ``eval`` may differ from the run's.
        told: called with each checkpoint and its ``eval/...`` metrics.

    Raises:
        ConfigError: the configuration has no eval dataset.
        CheckpointError: a checkpoint was made by a run whose model or trained roles have other settings.
    """
    if not assembly.evaluations:
        raise ConfigError(f"{assembly.loaded.source}: data.eval is empty; add a dataset to evaluate on")
    called = _called(assembly)
    routes = tuple(route for route in assembly.plan.weight_syncs if route.target in called)
    alone = _with_roles(assembly, called | {route.trainer for route in routes}, routes)
    saved = [name for name in alone.plan.roles if name in (*assembly.learning.learners, *assembly.plan.refreshes)]
    settings = recorded_values(assembly.loaded)
    for checkpoint in checkpoints:
        _check_settings(checkpoint, settings, saved, alone.plan)
    runtime, timers = build_runtime(alone), Timers()
    colocation = build_colocation(alone, runtime)
    rollouts = Rollouts(runtime, assembly.config.rollout, alone.plan.roles)
    parts = LoopParts(alone, runtime, rollouts, colocation)
    evaluators = build_evaluators(parts)
    assert evaluators is not None, "there is an eval dataset"
    weight_sync = WeightSyncManager(runtime, routes, colocation, Observers())
    try:
        await colocation.start(timers)
        for checkpoint in checkpoints:
            for role in saved:
                async with colocation.lease(DeviceUse(role, "load"), timers=timers):
                    await runtime.trainer(role).load(checkpoint.path / "roles" / role)
            await weight_sync.publish_version(int(checkpoint.state["policy_version"]), timers)
            metrics, _ = await evaluators.evaluate(timers)
            told(checkpoint, values(metrics))
    finally:
        parts.close()
        await runtime.close()


def _called(assembly: Assembly) -> set[str]:
    """The roles that evaluations call."""
    return {role for one in assembly.evaluations for role in one.calls.roles}


def _with_roles(assembly: Assembly, names: Collection[str], routes: tuple[WeightRoute, ...]) -> Assembly:
    """The assembly with these roles alone, and with evaluations that make every call."""
    planned = {**assembly.cached_roles, **assembly.plan.roles}
    roles = {name: role for name, role in planned.items() if name in names}
    evaluations = tuple(replace(one, graph=one.calls) for one in assembly.evaluations)
    return replace(assembly, evaluations=evaluations, plan=replace(assembly.plan, roles=roles, weight_syncs=routes))


def _check_settings(checkpoint: Checkpoint, settings: Mapping[str, Any], saved: Sequence[str], plan: RunPlan) -> None:
    """Raises CheckpointError: the model or the roles in the checkpoint had other settings than now."""
    parts = ("model", *(f"roles.{role}" for role in saved))
    changed = [
        line
        for line in changed_settings(checkpoint.state["config"], settings)
        if is_of(line, parts) and not is_of(line, (*MAY_CHANGE, *layout_settings(plan)))
    ]
    if changed:
        raise CheckpointError(
            f"{checkpoint.path} belongs to a run with other settings and cannot be evaluated with these:"
            + "".join(f"\n  {line}" for line in changed)
            + "\n  Restore them, or evaluate it with that run's configuration"
        )
