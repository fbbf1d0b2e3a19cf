"""The command ``chatlearn report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chatlearn_core.printable import printable
from chatlearn_observe.report import DEFAULT_MAX_ROLLOUTS, ReportSettings, write_report


def report(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run (output_dir).", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; RUN_DIR/report.html by default.")
    ] = None,
    max_rollouts: Annotated[
        int, typer.Option(min=0, help="Largest number of samples, spread evenly over the steps.")
    ] = DEFAULT_MAX_ROLLOUTS,
    tokenizer: Annotated[
        str | None, typer.Option(help="Model directory whose tokenizer shows tokens as text; the run's by default.")
    ] = None,
    token_text: Annotated[
        bool, typer.Option("--token-text/--token-ids", help="Show tokens as text, which loads a tokenizer, or as ids.")
    ] = True,
) -> None:
    """Write one HTML file about a run: curves, step times and rollouts. It needs no network.

    Works during a run, and on failed runs.
    """
    settings = ReportSettings(max_rollouts=max_rollouts, tokenizer=tokenizer, token_text=token_text)
    written = write_report(run_dir, output, settings)
    for note in written.notes:
        typer.echo(printable(f"note: {note}"), err=True)
    typer.echo(f"wrote {written.path} (steps: {written.num_steps}, rollouts: {written.num_rollouts})")
