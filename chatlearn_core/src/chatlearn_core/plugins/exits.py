"""Turns ``sys.exit`` in a plugin's code into a failure of that plugin, so that it does not end a run as if
requested."""

from __future__ import annotations

import traceback

from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins.records import PluginRecord
from chatlearn_core.plugins.registry import PluginRegistry

CODE_FIELDS = ("factory", "sender", "receiver", "app", "function")
"""Fields of records that name code."""


def exit_called(error: SystemExit, registry: PluginRegistry | None = None) -> PluginError:
    """The error to raise in place of ``SystemExit``: names the plugin that called ``sys.exit`` and the source line.

    Args:
        error: the caught ``SystemExit``.
        registry: maps packages to plugins.
    """
    entries = registry.entries if registry is not None else ()
    packages = {package: entry.origin for entry in entries for package in _packages_of(entry.record)}
    culprit, place = "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        place = f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"
        culprit = packages.get(module.partition(".")[0], culprit)
    return PluginError(
        f"{culprit or 'some code'} tried to end the process: SystemExit({error.code!r})\n"
        f"  raised in {place or 'an unknown place'}\n"
        "  A plugin must raise an error instead; repair or replace it."
    )


def _packages_of(record: PluginRecord | None) -> set[str]:
    """The top-level packages of a record's code."""
    return {getattr(record, name).partition(":")[0].partition(".")[0] for name in CODE_FIELDS if hasattr(record, name)}
