"""Registers the output ``acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import FlowMethodSpec, OutputSpec


@hookimpl
def chatlearn_outputs() -> Iterable[OutputSpec]:
    """Register the output; a trainer that computes it lists it in ``TrainerSpec.outputs``."""
    return [
        OutputSpec(
            name="acme",
            summary="Nats between the two likeliest tokens at each position.",
            per="token",
            shape=(),
            dtype="float",
            head="lm",
            masked=True,
            at_least=0.0,
        )
    ]


@hookimpl
def chatlearn_flow_methods() -> Iterable[FlowMethodSpec]:
    """Register the method with which flows ask a trainer role for it: ``m.policy.acme_values(samples)``."""
    return [
        FlowMethodSpec(
            name="trainer.acme_values",
            summary="Nats between the two likeliest tokens at each position.",
            arguments="chatlearn_core.flow.arguments:ComputeArguments",
            outputs=("acme",),
            granularity="batch",
        )
    ]
