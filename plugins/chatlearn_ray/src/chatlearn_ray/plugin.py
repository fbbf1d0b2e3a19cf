"""Registers the runtime ``ray``. Imports nothing heavy, so that listing plugins never imports Ray."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import CliCommandSpec, RuntimeSpec

RAY = ("ray>=2.60",)


@hookimpl
def chatlearn_runtimes() -> Iterable[RuntimeSpec]:
    """Register the runtime for several processes and machines."""
    return [
        RuntimeSpec(
            name="ray",
            summary="Every rank and replica is a Ray actor, on this machine or a cluster.",
            factory="chatlearn_ray.runtime:RayRuntime",
            options="chatlearn_ray.options:RayRuntimeOptions",
            requires=(RAY,),
            placement="anywhere",
            refreshes=True,
        )
    ]


@hookimpl
def chatlearn_cli_commands() -> Iterable[CliCommandSpec]:
    """Register ``chatlearn cluster``."""
    return [
        CliCommandSpec(
            name="cluster",
            app="chatlearn_ray.cli:app",
            help="Start a Ray cluster under torchrun, SLURM or PAI-DLC.",
            requires=(RAY,),
        )
    ]
