"""The entry point ``chatlearn``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from chatlearn_cli.lazy import LazyGroup
from chatlearn_cli.terminal import finish_streams, prepare_streams, tell
from chatlearn_core import __version__
from chatlearn_core.exceptions import ChatLearnError, Interrupted

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, which shells report for Ctrl-C."""
TRACEBACK_VARIABLE = "CHATLEARN_TRACEBACK"

app = typer.Typer(cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False)


def print_version(wanted: bool) -> None:
    """Print the version and exit if the option was given."""
    if wanted:
        typer.echo(f"chatlearn {__version__}")
        raise typer.Exit


@app.callback()
def chatlearn(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Reinforcement-learning post-training of language models, with every backend a plugin."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 for success, 2 for an error with a remedy, 130 for Ctrl-C.

    Errors of ChatLearn are printed without a traceback unless ``CHATLEARN_TRACEBACK=1``. Any other exception is a bug,
    here or in a plugin, and keeps its traceback.
    """
    # OpenMP reads this when torch is loaded, which has not happened yet: idle threads sleep instead of spinning.
    # Spinning made a step up to ten times slower when other processes used the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    prepare_streams()
    try:
        get_command(app)(args=None if arguments is None else list(arguments), prog_name="chatlearn")
    except ChatLearnError as error:
        if os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        if isinstance(error, Interrupted):  # a requested stop is not an error
            tell(str(error))
            sys.exit(EXIT_INTERRUPTED)
        tell(f"error: {error}")
        sys.exit(EXIT_ERROR)
    finally:
        finish_streams()


if __name__ == "__main__":
    main()
