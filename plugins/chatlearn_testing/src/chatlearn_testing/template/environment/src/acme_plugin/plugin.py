"""Registers the environment ``acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import EnvironmentSpec


@hookimpl
def chatlearn_environments() -> Iterable[EnvironmentSpec]:
    """Register the environment."""
    return [
        EnvironmentSpec(
            name="acme",
            summary="Guess a number that is higher or lower.",
            factory="acme_plugin.environment:AcmeEnvironment",
            options="acme_plugin.options:AcmeOptions",
        )
    ]
