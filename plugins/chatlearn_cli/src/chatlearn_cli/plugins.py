"""``chatlearn plugins``: installed plugins and their declarations."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from chatlearn_cli.lazy import PluginsGroup
from chatlearn_cli.plugin_report import entry_json, plugins_json, plugins_text, record_fields, record_text
from chatlearn_core.exceptions import PluginNotFoundError
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.sources import did_you_mean

app = typer.Typer(cls=PluginsGroup, no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Strict = Annotated[bool, typer.Option("--strict-plugins", help="Fail if any plugin cannot be used.")]


@app.callback()
def plugins() -> None:
    """List plugins and the combinations that fit; chatlearn-testing adds commands that create and check plugins."""


def list_plugins(as_json: AsJson = False, strict_plugins: Strict = False) -> None:
    """List every installed plugin with its status and, if it cannot be used, the reason."""
    registry = discover_plugins(strict=strict_plugins)
    typer.echo(to_json(plugins_json(registry)) if as_json else plugins_text(registry))


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


def entries_named(registry: PluginRegistry, name: str, kind: str | None) -> list[PluginEntry]:
    """Every entry with that name, whatever its status.

    Raises:
        PluginNotFoundError: there is none; suggests the nearest name.
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
    """The declared fields, then the options."""
    from chatlearn_cli.plugin_options import option_rows, options_text  # imports pydantic, which `list` need not

    text = record_text(entry)
    if entry.record is None or not hasattr(entry.record, "options"):
        return text
    return f"{text}\n\n{options_text(option_rows(registry.load_options(entry.record)))}"


def show_json(registry: PluginRegistry, entry: PluginEntry) -> dict[str, Any]:
    """The fields as plain data, and the options as a JSON schema."""
    shown = {**entry_json(entry), "record": record_fields(entry)}
    if entry.record is not None and hasattr(entry.record, "options"):
        shown["options_schema"] = registry.load_options(entry.record).model_json_schema()
    return shown


def to_json(value: object) -> str:
    """Indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False)
