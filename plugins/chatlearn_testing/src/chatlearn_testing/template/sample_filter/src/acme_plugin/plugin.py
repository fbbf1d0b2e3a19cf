"""Registers the filter ``acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import SampleFilterSpec


@hookimpl
def chatlearn_sample_filters() -> Iterable[SampleFilterSpec]:
    """Register the filter."""
    return [
        SampleFilterSpec(
            name="acme",
            summary="Leaves out completions much longer than those so far.",
            factory="acme_plugin.sample_filter:AcmeFilter",
            options="acme_plugin.options:AcmeOptions",
        )
    ]
