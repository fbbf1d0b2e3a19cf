"""Registers the step policy ``acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import StepPolicySpec


@hookimpl
def chatlearn_step_policies() -> Iterable[StepPolicySpec]:
    """Register the step policy."""
    return [
        StepPolicySpec(
            name="acme",
            summary="Ends a run that has trained on a number of tokens.",
            factory="acme_plugin.step_policy:AcmeStepPolicy",
            options="acme_plugin.options:AcmeOptions",
        )
    ]
