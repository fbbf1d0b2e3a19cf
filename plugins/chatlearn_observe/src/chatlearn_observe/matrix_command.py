"""The command ``chatlearn plugins matrix``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_observe.compatibility_matrix import (
    compatibility_matrix,
    matrix_json,
    matrix_text,
    read_environment,
    read_tested,
)

TESTED_FILE = "CHATLEARN_TESTED_MATRIX"
"""Environment variable with the path of the test record that ``matrix`` shows by default."""


def matrix(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    tested: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar=TESTED_FILE, help="JSON record of what was tested, for the column TESTED."),
    ] = None,
) -> None:
    """Show which trainer, generator and weight sync fit together, and why not."""
    rows = compatibility_matrix(discover_plugins(), read_tested(tested) if tested else None)
    environment = read_environment(tested) if tested else None
    shown = json.dumps(matrix_json(rows), indent=2, ensure_ascii=False) if as_json else matrix_text(rows, environment)
    typer.echo(shown)
