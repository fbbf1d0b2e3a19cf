"""Registers the kind of examples ``acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import ExampleKindSpec


@hookimpl
def chatlearn_example_kinds() -> Iterable[ExampleKindSpec]:
    """Register the kind; an algorithm selects it with ``input = "acme"``."""
    return [
        ExampleKindSpec(
            name="acme",
            summary="Completions to imitate, each with a weight: the column 'weight', 1 without it.",
            factory="acme_plugin.example_kind:AcmeKind",
            has_samples=True,
        )
    ]
