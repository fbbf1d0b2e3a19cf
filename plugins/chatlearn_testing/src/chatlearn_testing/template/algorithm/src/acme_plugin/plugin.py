"""Registers the algorithm ``acme``. Imports no torch: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import AlgorithmSpec


@hookimpl
def chatlearn_algorithms() -> Iterable[AlgorithmSpec]:
    """Register the algorithm, with the roles that a configuration must define for it."""
    return [
        AlgorithmSpec(
            name="acme",
            summary="REINFORCE with a leave-one-out baseline.",
            factory="acme_plugin.algorithm:Acme",
            options="acme_plugin.options:AcmeOptions",
            roles=(("trainer", "trainer"), ("generator", "generator"), ("reward", "reward")),
        )
    ]
