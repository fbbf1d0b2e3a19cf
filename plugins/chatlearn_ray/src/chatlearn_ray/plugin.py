"""Registers the runtime ``ray`` and launchers of clusters. Imports nothing heavy, so that listing plugins never imports
Ray.
"""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import CliCommandSpec, LauncherSpec, RuntimeSpec

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
def chatlearn_launchers() -> Iterable[LauncherSpec]:
    """Register torchrun before PAI-DLC, whose variables torchrun sets, too."""
    return [
        LauncherSpec(
            name="torchrun",
            summary="torchrun of PyTorch, one process or more per node.",
            function="chatlearn_ray.launchers:torchrun",
            recognised_by=("GROUP_RANK",),
            order=100,
        ),
        LauncherSpec(
            name="pai-dlc",
            summary="Jobs of Alibaba Cloud PAI-DLC.",
            function="chatlearn_ray.launchers:pai_dlc",
            recognised_by=("RANK", "WORLD_SIZE", "MASTER_ADDR"),
            order=200,
        ),
        LauncherSpec(
            name="slurm",
            summary="srun of SLURM.",
            function="chatlearn_ray.launchers:slurm",
            recognised_by=("SLURM_NODEID",),
            order=300,
        ),
    ]


@hookimpl
def chatlearn_cli_commands() -> Iterable[CliCommandSpec]:
    """Register ``chatlearn cluster``."""
    return [
        CliCommandSpec(
            name="cluster",
            app="chatlearn_ray.cli:app",
            help="Start a Ray cluster under torchrun, PAI-DLC, SLURM or another launcher.",
            requires=(RAY,),
        )
    ]
