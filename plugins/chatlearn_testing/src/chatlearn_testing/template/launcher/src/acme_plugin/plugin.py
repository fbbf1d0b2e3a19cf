"""Registers the launcher ``acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import LauncherSpec


@hookimpl
def chatlearn_launchers() -> Iterable[LauncherSpec]:
    """Register the launcher after torchrun (100), PAI-DLC (200) and SLURM (300)."""
    return [
        LauncherSpec(
            name="acme",
            summary="Indexed Jobs of Kubernetes.",
            function="acme_plugin.launcher:acme",
            recognised_by=("JOB_COMPLETION_INDEX",),
            order=400,
        )
    ]
