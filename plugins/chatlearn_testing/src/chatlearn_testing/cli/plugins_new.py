"""``chatlearn plugins new``: writes a working plugin package from a template."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chatlearn_testing.scaffold import TemplateKind, write_plugin


def new(
    name: Annotated[str, typer.Argument(help="Name of the distribution, such as acme-reward.", show_default=False)],
    kind: Annotated[TemplateKind, typer.Option(help="What the plugin is.", show_default=False)],
    directory: Annotated[
        Path, typer.Option(help="Where to make the package's folder.", show_default="the current directory")
    ] = Path(),
) -> None:
    """Create a working plugin package with tests, as a starting point."""
    names, written = write_plugin(name, kind.value, directory)
    root = directory / names.distribution
    # pip would take a path without the dot for the name of a distribution to download.
    shown = root if root.is_absolute() else f"./{root}"
    typer.echo(
        f"wrote {len(written)} files of the {kind.value} {names.plugin!r} to {shown}\n\n"
        f"  pip install -e '{shown}[testing]'\n"
        f"  pytest {shown}\n"
        f"  chatlearn plugins check {names.distribution}"
    )
