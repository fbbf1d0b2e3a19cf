"""Registers the trainer ``acme``. Imports no torch: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import TrainerSpec


@hookimpl
def chatlearn_trainers() -> Iterable[TrainerSpec]:
    """Return the trainer of this distribution; the core relies on every capability that its record declares."""
    return [
        TrainerSpec(
            name="acme",
            summary="A bigram model in one process.",
            factory="acme_plugin.trainer:AcmeTrainer",
            options="acme_plugin.options:AcmeOptions",
            heads=frozenset({"lm"}),
            outputs=frozenset({"logprobs", "entropy"}),
            exports=frozenset({"full_tensors"}),
            max_ranks=1,
        )
    ]
