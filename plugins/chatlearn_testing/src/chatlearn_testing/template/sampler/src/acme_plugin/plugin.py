"""Registers the sampler ``acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import SamplerSpec


@hookimpl
def chatlearn_samplers() -> Iterable[SamplerSpec]:
    """Register the sampler."""
    return [
        SamplerSpec(
            name="acme",
            summary="Prompts that the policy solved rest for some passes.",
            factory="acme_plugin.sampler:AcmeSampler",
            options="acme_plugin.options:AcmeOptions",
        )
    ]
