"""``chatlearn cluster``: bring a Ray cluster up under a launcher."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from chatlearn_core.exceptions import ConfigError
from chatlearn_ray.launch import DEFAULT_PORT, node_role

app = typer.Typer(help="Bring a Ray cluster up, for runs with runtime.options.address: auto.", no_args_is_help=True)


@app.callback()
def cluster() -> None:
    """Bring a Ray cluster up, for runs with runtime.options.address: auto."""


@app.command()
def up(
    port: Annotated[int, typer.Option(help="Port of the head.")] = DEFAULT_PORT,
    show: Annotated[bool, typer.Option("--show", help="Print the command of this node, run nothing.")] = False,
) -> None:
    """Start head or worker on this node, as torchrun, SLURM or PAI-DLC numbered it. Run it once on every node."""
    role = node_role(os.environ)
    command = role.command(port)
    part = "head" if role.is_head else f"worker of {role.head}"
    typer.echo(f"{role.launcher}: node {role.rank} of {role.num_nodes}, {part}: {shlex.join(command)}")
    if show:
        return
    if role.local_rank != 0:
        typer.echo("another process of this node starts Ray")
        return
    ray = Path(sys.executable).with_name("ray")
    if not ray.exists():
        raise ConfigError(f"there is no {ray}: Ray is not installed in this interpreter's environment")
    os.execv(ray, [str(ray), *command[1:]])
