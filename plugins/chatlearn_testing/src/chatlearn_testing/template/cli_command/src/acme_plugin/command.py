"""The command ``chatlearn acme``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from chatlearn_core.exceptions import DataError


def last_metrics(
    run_dir: Annotated[Path, typer.Argument(help="The directory of a run.")],
    prefix: Annotated[str, typer.Option(help="Show only metrics whose names begin with this.")] = "",
) -> None:
    """Show the last metrics of a run."""
    file = run_dir / "metrics.jsonl"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}; give the directory of a run") from error
    if not lines:
        raise DataError(f"{file} has no step yet; wait for the first one")
    for name, value in sorted(json.loads(lines[-1]).items()):
        if name.startswith(prefix):
            typer.echo(f"{name} {value}")
