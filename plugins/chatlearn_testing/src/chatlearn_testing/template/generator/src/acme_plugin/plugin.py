"""Registers the generator ``acme``. Imports no torch: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import GeneratorSpec


@hookimpl
def chatlearn_generators() -> Iterable[GeneratorSpec]:
    """The generator of this distribution, and what it can do: the core relies on every word of it.

    An engine would be named in ``requires``, as alternatives: ``requires=(("acme-engine>=2", "acme-engine-cpu>=2"),)``.
    """
    return [
        GeneratorSpec(
            name="acme",
            summary="Samples from a bigram model, a token a turn of the event loop.",
            factory="acme_plugin.generator:AcmeGenerator",
            options="acme_plugin.options:AcmeOptions",
            channels=frozenset({"tensors"}),
            kv_after_sync="recomputed",
            streaming=True,
            resumable=True,
            seeded=True,
            model_families=frozenset({"bigram"}),
        )
    ]
