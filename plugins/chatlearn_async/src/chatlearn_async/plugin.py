"""Registers the rollout modes of this distribution."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import RolloutModeSpec


@hookimpl
def chatlearn_rollout_modes() -> Iterable[RolloutModeSpec]:
    """``one_step_off``, ``async`` and ``recorded``."""
    return [
        RolloutModeSpec(
            name="one_step_off",
            summary="While a step trains, the rollouts of the next are made; weights change when both are done.",
            factory="chatlearn_async.producer:one_step_off",
            options="chatlearn_async.options:OneStepOffOptions",
            max_staleness=1,
            plan="chatlearn_async.plan:one_step_off",
        ),
        RolloutModeSpec(
            name="async",
            summary="Rollouts are made up to rollout.max_staleness steps ahead, and go on under new weights.",
            factory="chatlearn_async.producer:asynchronous",
            options="chatlearn_async.options:AsyncOptions",
            max_staleness=1,
            plan="chatlearn_async.plan:asynchronous",
        ),
        RolloutModeSpec(
            name="recorded",
            summary="Steps train on rollouts that chatlearn run --rollouts-only has written; nothing is sampled.",
            factory="chatlearn_async.recorded_producer:recorded",
            options="chatlearn_async.options:RecordedOptions",
            plan="chatlearn_async.recorded_producer:plan",
            makes_rollouts=False,
            record="chatlearn_async.recorder:record",
        ),
    ]
