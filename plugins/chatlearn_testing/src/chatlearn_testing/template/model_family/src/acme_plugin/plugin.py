"""Registers the model family ``acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import ModelFamilySpec


@hookimpl
def chatlearn_model_families() -> Iterable[ModelFamilySpec]:
    """Register the family."""
    return [
        ModelFamilySpec(
            name="acme",
            summary="Models with one token per character.",
            factory="acme_plugin.family:AcmeFamily",
            options="acme_plugin.options:AcmeOptions",
            model_types=frozenset({"acme"}),
        )
    ]
