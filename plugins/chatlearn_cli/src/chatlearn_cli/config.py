"""``chatlearn config``: show, validate and describe run configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chatlearn_cli.terminal import tell
from chatlearn_core.exceptions import ChatLearnError

if TYPE_CHECKING:
    from chatlearn_core.config.load import LoadedConfig

app = typer.Typer(name="config", help="Show, validate and describe run configurations.", no_args_is_help=True)

EXIT_INVALID = 2

File = Annotated[Path, typer.Argument(help="A YAML configuration.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="key=value sets, ~key deletes; such as train.steps=10.", show_default=False),
]


@app.command()
def show(
    file: File,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of YAML.")] = False,
) -> None:
    """Print the configuration as a run sees it: with overrides, resolved, with every default."""
    loaded = _load(file, overrides)
    from chatlearn_core.config.show import resolved_values, to_yaml

    values = resolved_values(loaded)
    typer.echo(json.dumps(values, indent=2, ensure_ascii=False) if as_json else to_yaml(values), nl=as_json)


@app.command()
def validate(file: File, overrides: Overrides = None) -> None:
    """Check the configuration and report every problem; exit code 2 if there is one. Warnings do not count."""
    loaded = _load(file, overrides)
    mode = _check_flow(loaded)
    for warning in loaded.warnings:
        tell(f"warning: {warning}")
    plugins = ", ".join(f"{key}: {choice.record.name}" for key, choice in loaded.choices.items())
    typer.echo(f"{loaded.source} is valid ({plugins})")
    for line in mode:
        typer.echo(f"  {line}")


@app.command()
def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file instead of printing.", show_default=False)
    ] = None,
) -> None:
    """Print a JSON schema for editors, with the options of every installed plugin."""
    from chatlearn_cli.config_schema import config_schema
    from chatlearn_core.plugins.loader import discover_plugins

    described, failures = config_schema(discover_plugins())
    for failure in failures:
        tell(f"left out: {failure}")
    text = json.dumps(described, indent=2)
    if output is None:
        typer.echo(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        typer.echo(f"{output}: the schema cannot be written: {error.strerror}", err=True)
        raise typer.Exit(EXIT_INVALID) from error


def _load(file: Path, overrides: list[str] | None) -> LoadedConfig:
    from chatlearn_core.config.load import load_config  # imported here because it loads OmegaConf and pydantic

    try:
        return load_config(file, overrides or ())
    except ChatLearnError as error:
        tell(str(error))
        raise typer.Exit(EXIT_INVALID) from error


def _check_flow(loaded: LoadedConfig) -> tuple[str, ...]:
    """Make the checks that a run makes before it opens a model or data; returns what its plan says of rollouts."""
    from chatlearn_core.executor.assembly import assemble_flow  # loads torch
    from chatlearn_core.plugins.loader import discover_plugins

    try:
        return assemble_flow(loaded, discover_plugins()).mode
    except ChatLearnError as error:
        typer.echo(f"{loaded.source}: {error}", err=True)
        raise typer.Exit(EXIT_INVALID) from error
