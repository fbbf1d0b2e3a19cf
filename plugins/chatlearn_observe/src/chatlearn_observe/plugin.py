"""What chatlearn-observe registers: loggers and ``chatlearn report``."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import CliCommandSpec, LoggerSpec


@hookimpl
def chatlearn_loggers() -> Iterable[LoggerSpec]:
    """``tensorboard`` and ``wandb``; each needs its own library only when a run selects it."""
    return [
        LoggerSpec(
            name="tensorboard",
            summary="Event files that TensorBoard reads.",
            factory="chatlearn_observe.tensorboard_logger:TensorBoardLogger",
            options="chatlearn_observe.options:TensorBoardOptions",
            requires=(("tensorboard>=2.17",),),
        ),
        LoggerSpec(
            name="wandb",
            summary="Weights & Biases, online or offline.",
            factory="chatlearn_observe.wandb_logger:WandbLogger",
            options="chatlearn_observe.options:WandbOptions",
            requires=(("wandb>=0.18",),),
        ),
    ]


@hookimpl
def chatlearn_cli_commands() -> Iterable[CliCommandSpec]:
    """``chatlearn report``."""
    return [
        CliCommandSpec(
            name="report",
            app="chatlearn_observe.cli:report",
            help="Write a run directory's report: one HTML file with curves, times and rollouts.",
        )
    ]
