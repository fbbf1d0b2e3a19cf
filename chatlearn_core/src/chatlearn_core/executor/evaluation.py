"""Evaluation of the model in a directory, without a trainer."""

from __future__ import annotations

from dataclasses import replace

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.assembly import Assembly
from chatlearn_core.executor.component_factory import LoopParts, build_evaluators, build_runtime
from chatlearn_core.executor.metrics_line import values
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.metrics import Timers


async def evaluate_model(assembly: Assembly) -> dict[str, float]:
    """Start only the roles of the evaluation and evaluate once; returns the ``eval/...`` metrics.

    Raises:
        ConfigError: the configuration has no eval dataset.
    """
    if not assembly.evaluations:
        raise ConfigError(f"{assembly.loaded.source}: data.eval is empty; add a dataset to evaluate on")
    evaluations = tuple(replace(one, graph=one.calls) for one in assembly.evaluations)
    planned = {**assembly.cached_roles, **assembly.plan.roles}
    called = {role for one in evaluations for role in one.graph.roles}
    roles = {name: role for name, role in planned.items() if name in called}
    alone = replace(assembly, evaluations=evaluations, plan=replace(assembly.plan, roles=roles, weight_syncs=()))
    runtime = build_runtime(alone)
    rollouts = Rollouts(runtime, assembly.config.rollout, alone.plan.roles)
    evaluators = build_evaluators(LoopParts(alone, runtime, rollouts))
    assert evaluators is not None, "there is an eval dataset"
    try:
        await runtime.start()
        metrics, _ = await evaluators.evaluate(Timers())
    finally:
        await runtime.close()
    return values(metrics)
