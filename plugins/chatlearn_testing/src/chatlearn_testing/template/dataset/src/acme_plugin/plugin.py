"""Registers the dataset format ``acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import DatasetSpec


@hookimpl
def chatlearn_datasets() -> Iterable[DatasetSpec]:
    """Register the format; ``format: auto`` selects it for files that have all of ``columns``."""
    return [
        DatasetSpec(
            name="acme",
            summary="Multiple choice: question, choices, answer (a number from 0, a letter, or the text).",
            factory="acme_plugin.dataset:AcmeFormat",
            options="acme_plugin.options:AcmeOptions",
            columns=frozenset({"question", "choices", "answer"}),
        )
    ]
