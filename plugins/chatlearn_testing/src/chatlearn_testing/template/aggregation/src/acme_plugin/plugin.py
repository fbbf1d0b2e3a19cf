"""Registers the aggregation ``acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import AggregationSpec


@hookimpl
def chatlearn_aggregations() -> Iterable[AggregationSpec]:
    """Register the aggregation; an algorithm's option ``aggregation: acme`` selects it."""
    return [
        AggregationSpec(
            name="acme",
            summary="The mean over sequences, weighted by a power of their length, of a sequence's mean.",
            function="acme_plugin.aggregation:power_of_length",
            options="acme_plugin.options:AcmeOptions",
            loss_unit="sequence",
        )
    ]
