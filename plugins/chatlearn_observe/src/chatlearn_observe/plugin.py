"""Registers loggers and commands, and adds files to a run's directory.

Imports happen inside functions, because every command imports this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import CliCommandSpec, LoggerSpec

if TYPE_CHECKING:
    from chatlearn_core.flow import Graph
    from chatlearn_core.types import RunFailure


@hookimpl
def chatlearn_loggers() -> Iterable[LoggerSpec]:
    """Register ``tensorboard`` and ``wandb``; each needs its own library only when a run selects it."""
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
    """Register the commands that show runs, plugins and flows."""
    return [
        CliCommandSpec(
            name="report",
            app="chatlearn_observe.cli:report",
            help="Write a run directory's report: one HTML file with curves, times and rollouts.",
        ),
        CliCommandSpec(
            name="plugins matrix",
            app="chatlearn_observe.matrix_command:matrix",
            help="Show which trainer, generator and weight sync fit together.",
        ),
        CliCommandSpec(
            name="flow",
            app="chatlearn_observe.flow_command:flow",
            help="Show an algorithm's data flow as text, Mermaid or SVG.",
        ),
    ]


@hookimpl
def chatlearn_run_start(run_dir: Path, graph: Graph) -> None:
    """Write ``flow.svg``."""
    from chatlearn_core.metrics.run_directory import write_text
    from chatlearn_observe.flow_pictures import to_svg

    write_text(run_dir / "flow.svg", to_svg(graph))


@hookimpl
def chatlearn_error(error: BaseException, failure: RunFailure) -> None:
    """Write ``failure.md``."""
    from chatlearn_core.metrics.run_directory import FAILURE_PAGE, write_text
    from chatlearn_observe.failure_page import failure_page

    write_text(failure.run_dir / FAILURE_PAGE, failure_page(error, failure))
