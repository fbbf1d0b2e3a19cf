"""Registers the flow method ``trainer.acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import FlowMethodSpec


@hookimpl
def chatlearn_flow_methods() -> Iterable[FlowMethodSpec]:
    """Register the method; a flow calls it on a trainer role: ``m.reference.acme(samples)``."""
    return [
        FlowMethodSpec(
            name="trainer.acme",
            summary="Logprobs of the tokens, and their mean over each sample's tokens.",
            arguments="acme_plugin.arguments:AcmeArguments",
            outputs=("logprobs",),
            adds=("{name}_acme",),
            granularity="batch",
            action="acme_plugin.flow_method:mean_logprobs",
        )
    ]
