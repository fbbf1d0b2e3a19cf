"""Registers the transport ``acme``. Imports no torch: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import WeightSyncSpec


@hookimpl
def chatlearn_weight_syncs() -> Iterable[WeightSyncSpec]:
    """Return the transport of this distribution. Its record names required capabilities, not trainers or generators."""
    return [
        WeightSyncSpec(
            name="acme",
            summary="Buckets of whole tensors in files on a disk that both ends share.",
            sender="acme_plugin.sender:AcmeSender",
            receiver="acme_plugin.receiver:AcmeReceiver",
            options="acme_plugin.options:AcmeOptions",
            exports=("full_tensors",),
            channels=("tensors",),
            reach="anywhere",
            speed_rank=95,
        )
    ]
