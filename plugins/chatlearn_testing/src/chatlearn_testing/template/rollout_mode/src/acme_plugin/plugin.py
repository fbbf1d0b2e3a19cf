"""Registers the rollout mode ``acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import RolloutModeSpec


@hookimpl
def chatlearn_rollout_modes() -> Iterable[RolloutModeSpec]:
    """Register the rollout mode."""
    return [
        RolloutModeSpec(
            name="acme",
            summary="The rollouts of the next steps are made while a step trains; a weight sync waits for them.",
            factory="acme_plugin.producer:make_producer",
            options="acme_plugin.options:AcmeOptions",
            max_staleness=1,
            plan="acme_plugin.plan:plan",
        )
    ]
