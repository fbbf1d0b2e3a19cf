"""``chatlearn plugins``: what is installed, what it declares, what fits together, and how to write another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from chatlearn_core.cli.plugins_check import check
from chatlearn_core.cli.plugins_new import new
from chatlearn_core.exceptions import PluginNotFoundError
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.matrix import compatibility_matrix, matrix_json, read_environment, read_tested
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.report import (
    entry_json,
    matrix_text,
    plugins_json,
    plugins_text,
    record_fields,
    record_text,
)
from chatlearn_core.plugins.sources import did_you_mean

app = typer.Typer(help="List, show, write and check plugins.", no_args_is_help=True)
app.command()(new)
app.command()(check)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Strict = Annotated[bool, typer.Option("--strict-plugins", help="Fail if any plugin cannot be used.")]
TESTED_FILE = "CHATLEARN_TESTED_MATRIX"
"""Environment variable with the path of the record that ``matrix`` shows by default."""


@app.command("list")
def list_plugins(as_json: AsJson = False, strict_plugins: Strict = False) -> None:
    """List every installed plugin with its status, and why it cannot be used where it cannot."""
    registry = discover_plugins(strict=strict_plugins)
    typer.echo(to_json(plugins_json(registry)) if as_json else plugins_text(registry))


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Name of a plugin, as `plugins list` shows it.")],
    kind: Annotated[str | None, typer.Option(help="Only plugins of this kind.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a plugin declares, and its options with types, defaults and descriptions."""
    registry = discover_plugins()
    entries = entries_named(registry, name, kind)
    if as_json:
        typer.echo(to_json({"plugins": [show_json(registry, entry) for entry in entries]}))
    else:
        typer.echo("\n\n".join(show_text(registry, entry) for entry in entries))


@app.command()
def matrix(
    as_json: AsJson = False,
    tested: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar=TESTED_FILE, help="JSON record of what was tested, for the column TESTED."),
    ] = None,
) -> None:
    """Show which trainer, generator and weight sync fit together, and why not."""
    rows = compatibility_matrix(discover_plugins(), read_tested(tested) if tested else None)
    environment = read_environment(tested) if tested else None
    typer.echo(to_json(matrix_json(rows)) if as_json else matrix_text(rows, environment))


def entries_named(registry: PluginRegistry, name: str, kind: str | None) -> list[PluginEntry]:
    """Every entry of that name, whatever its status.

    Raises:
        PluginNotFoundError: there is none; names the nearest.
    """
    entries = [entry for entry in registry.entries if entry.name == name and kind in (None, entry.kind)]
    if not entries:
        of_kind = f" of kind {kind!r}" if kind else ""
        known = sorted({entry.name for entry in registry.entries})
        raise PluginNotFoundError(
            f"No plugin named {name!r}{of_kind} is installed; `chatlearn plugins list` shows all."
            + did_you_mean(name, known)
        )
    return entries


def show_text(registry: PluginRegistry, entry: PluginEntry) -> str:
    """Declared fields, then options."""
    from chatlearn_core.plugins.options import option_rows, options_text  # imports pydantic, which `list` need not

    text = record_text(entry)
    if entry.record is None or not hasattr(entry.record, "options"):
        return text
    return f"{text}\n\n{options_text(option_rows(registry.load_options(entry.record)))}"


def show_json(registry: PluginRegistry, entry: PluginEntry) -> dict[str, Any]:
    """The same as plain data; options as a JSON schema."""
    shown = {**entry_json(entry), "record": record_fields(entry)}
    if entry.record is not None and hasattr(entry.record, "options"):
        shown["options_schema"] = registry.load_options(entry.record).model_json_schema()
    return shown


def to_json(value: object) -> str:
    """JSON for people and programs."""
    return json.dumps(value, indent=2, ensure_ascii=False)
