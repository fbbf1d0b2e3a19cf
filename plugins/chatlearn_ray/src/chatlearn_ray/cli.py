"""The command ``chatlearn cluster``: brings a Ray cluster up under a launcher."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_ray.cluster_token import MODE, TOKEN_PATH, use_token
from chatlearn_ray.launch import DEFAULT_PORT, find_part, ray_command

USAGE_STATS = "RAY_USAGE_STATS_ENABLED"
"""Ray sends usage statistics to its developers unless this variable is 0."""

app = typer.Typer(help="Start a Ray cluster for runs with runtime.options.address: auto.", no_args_is_help=True)


@app.callback()
def cluster() -> None:
    """Start a Ray cluster for runs with runtime.options.address: auto."""


@app.command()
def up(
    port: Annotated[int, typer.Option(help="Port of the head.")] = DEFAULT_PORT,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the cluster's token, on a shared disk; the head writes it if it does not "
            "exist. By default RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token."
        ),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(help="Name of the launcher; by default the first, in their order, whose variables are set."),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print this node's command without running it.")] = False,
) -> None:
    """Start head or worker on this node, as numbered by torchrun, PAI-DLC, SLURM or another launcher. Run it once on
    every node.
    """
    name, part = find_part(discover_plugins(), os.environ, launcher)
    command, is_head = ray_command(part, port), part.rank == 0
    task = "head" if is_head else f"worker of {part.head}"
    environment = dict(os.environ)
    environment.setdefault(USAGE_STATS, "0")
    starts = part.local_rank == 0 and not show
    if starts:
        source = use_token(environment, token_file, is_head=is_head)
    elif token_file is not None:
        environment |= {MODE: "token", TOKEN_PATH: str(token_file.expanduser().absolute())}
    told = [f"{name}={environment[name]}" for name in (USAGE_STATS, MODE, TOKEN_PATH) if name in environment]
    typer.echo(f"{name}: node {part.rank} of {part.num_nodes}, {task}: {shlex.join([*told, *command])}")
    if show:
        return
    if not starts:
        typer.echo("another process of this node starts Ray")
        return
    typer.echo(source)
    ray = Path(sys.executable).with_name("ray")
    if not ray.exists():
        raise ConfigError(f"there is no {ray}: Ray is not installed in this interpreter's environment")
    os.execve(ray, [str(ray), *command[1:]], environment)
