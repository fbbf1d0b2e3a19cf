"""Plugins as text and as plain data, for ``chatlearn plugins``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from chatlearn_core import __version__
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.records import PLUGIN_API_VERSION
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.table import table

LIST_HEADER = ("KIND", "NAME", "DISTRIBUTION", "VERSION", "STATUS", "")


def plugins_text(registry: PluginRegistry) -> str:
    """The table of ``chatlearn plugins list``: usable plugins with their summaries, others with the reason."""
    rows = [
        (
            entry.kind or "?",
            entry.name,
            entry.distribution,
            entry.version,
            entry.status,
            entry.reason or summary(entry),
        )
        for entry in registry.entries
    ]
    return "\n".join([table(LIST_HEADER, rows), *(f"warning: {warning}" for warning in registry.warnings)])


def plugins_json(registry: PluginRegistry) -> dict[str, Any]:
    """The output of ``chatlearn plugins list --json``."""
    return {
        "chatlearn_core": __version__,
        "plugin_api_version": PLUGIN_API_VERSION,
        "plugins": [entry_json(entry) for entry in registry.entries],
        "warnings": list(registry.warnings),
    }


def entry_json(entry: PluginEntry) -> dict[str, Any]:
    """One plugin as plain data."""
    return {
        "name": entry.name,
        "kind": entry.kind,
        "distribution": entry.distribution,
        "version": entry.version,
        "status": entry.status,
        "reason": entry.reason,
        "summary": summary(entry),
    }


def summary(entry: PluginEntry) -> str:
    """The plugin's own summary."""
    return entry.record.summary or getattr(entry.record, "help", "") if entry.record else ""


def record_fields(entry: PluginEntry) -> dict[str, Any]:
    """The fields that a record declares, as plain data in declaration order."""
    if entry.record is None:
        return {}
    return {field.name: plain(getattr(entry.record, field.name)) for field in dataclasses.fields(entry.record)}


def plain(value: Any) -> Any:
    """Convert sets to sorted lists, tuples to lists, and records to mappings, for JSON."""
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def record_text(entry: PluginEntry) -> str:
    """Status, origin and declared fields, one per line."""
    lines = [
        ("kind", entry.kind or "unknown"),
        ("name", entry.name),
        ("distribution", entry.origin),
        ("status", f"{entry.status}: {entry.reason}" if entry.reason else entry.status),
    ]
    lines += [(name, field_text(value)) for name, value in record_fields(entry).items() if name != "name"]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in lines)


def field_text(value: Any) -> str:
    """Return a field's value on one line; a mapping of mappings as ``judge (kinds: generator; outputs: none)``."""
    if isinstance(value, Mapping):
        items = (
            f"{key} ({field_text(item)})" if isinstance(item, Mapping) else f"{key}: {field_text(item)}"
            for key, item in value.items()
        )
        return "; ".join(items) or "none"
    if isinstance(value, list):
        return ", ".join(" or ".join(item) if isinstance(item, list) else str(item) for item in value) or "none"
    return "any" if value is None else str(value)
