"""Evaluation of the model in a directory, without a trainer."""

from __future__ import annotations

from dataclasses import replace

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.assembly import Assembly
from chatlearn_core.executor.component_factory import LoopParts, build_evaluator, build_runtime
from chatlearn_core.executor.metrics_line import values
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.metrics import Timers


async def evaluate_model(assembly: Assembly) -> dict[str, float]:
    """Start only the roles of the evaluation and evaluate once; returns the ``eval/...`` metrics.

    Raises:
        ConfigError: the configuration has no eval dataset.
    """
    if assembly.evaluation is None or assembly.eval_set is None:
        raise ConfigError(f"{assembly.loaded.source}: data.eval is empty; add a dataset to evaluate on")
    calls = assembly.evaluation_calls or assembly.evaluation
    planned = {**assembly.cached_roles, **assembly.plan.roles}
    roles = {name: role for name, role in planned.items() if name in calls.roles}
    alone = replace(assembly, evaluation=calls, plan=replace(assembly.plan, roles=roles, weight_syncs=()))
    runtime = build_runtime(alone)
    rollouts = Rollouts(runtime, assembly.config.rollout, alone.plan.roles)
    evaluator = build_evaluator(LoopParts(alone, runtime, rollouts))
    assert evaluator is not None, "there is an eval dataset"
    try:
        await runtime.start()
        metrics, _ = await evaluator.evaluate(Timers())
    finally:
        await runtime.close()
    return values(metrics)
