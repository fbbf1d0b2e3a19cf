"""Registers the reader ``acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import DatasetSpec


@hookimpl
def chatlearn_datasets() -> Iterable[DatasetSpec]:
    """Register the reader; a run uses it for data files with these suffixes."""
    return [
        DatasetSpec(
            name="acme",
            summary="Reads rows of .tsv files: tab-separated values under a header.",
            factory="acme_plugin.reader:AcmeReader",
            options="acme_plugin.options:AcmeOptions",
            reads=frozenset({".tsv"}),
        )
    ]
