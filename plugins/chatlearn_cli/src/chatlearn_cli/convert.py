"""``chatlearn convert``: a checkpoint of one trainer becomes a checkpoint of another."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from chatlearn_cli.run import ConfigFile, StrictPlugins, assemble, discover, load, until_interrupted
from chatlearn_cli.terminal import tell


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, such as outputs/run/checkpoints/step_00000010.")],
    config: ConfigFile,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to replace, as key=value.", metavar="[KEY=VALUE]...")
    ] = None,
    strict_plugins: StrictPlugins = False,
) -> None:
    """Convert a checkpoint for a configuration with other trainers, which then continues the run.

    Weights go through Hugging Face model directories; the place in the data, unfinished rollouts and totals are kept;
    optimizers and learning-rate schedules start anew.
    """
    from chatlearn_cli.conversion import convert as convert_checkpoint
    from chatlearn_core.config.show import to_yaml
    from chatlearn_core.executor.checkpoint import read_checkpoint

    registry = discover(strict_plugins)
    after = assemble(load(config, overrides, registry), registry)
    source = read_checkpoint(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder) / "config.yaml"
        recorded.write_text(to_yaml(source.state["config"]), encoding="utf-8")
        before = assemble(load(recorded, None, registry), registry)
        written, roles = until_interrupted(convert_checkpoint(source, before, after))
    tell(f"converted {', '.join(roles)}: {written}")
    command = shlex.join(["chatlearn", "run", str(config), *(overrides or [])])
    tell(f"continue with: {command}")
