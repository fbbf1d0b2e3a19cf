"""Loads new or changed plugins in a child process before this process needs them.

A plugin's exception can be caught, but a plugin that ends the process (``os._exit``, a crash in C), never returns or
patches functions that everyone uses cannot: such a plugin is reported and not imported here. Of the others the child
sends the records, which are remembered by distribution, version and state of the files, so that this process imports
a plugin only when a run uses it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

from chatlearn_core import __version__
from chatlearn_core.plugins.markers import PROJECT
from chatlearn_core.plugins.records import PluginRecord
from chatlearn_trial import Memory, Outcome, Task, cache_file, key_of, outcomes, seconds, unpacked
from chatlearn_trial.files import files_in, files_of, installation_state, summary

LIMIT_VARIABLE = "CHATLEARN_PLUGIN_TIMEOUT_S"
"""Time limit for importing one plugin, seconds; 0 disables the trial."""
DEFAULT_LIMIT_S = 10.0
LOST_S = 600.0
"""Time for which it is remembered that a plugin hangs or ends the process, seconds."""
TRIED_VARIABLE = "CHATLEARN_PLUGINS_TRIED"
"""The sources that this process has tried, passed to its child processes so that they need not try again."""


@dataclass(slots=True, frozen=True)
class Loaded:
    """What a trial knows about a source."""

    failed: str = ""
    """Reason not to import the source here."""
    records: tuple[PluginRecord, ...] | None = None
    """Its records; None: not known, the source must be imported."""
    observers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Its observing hooks and their arguments, in the order in which importing it finds them."""
    warning: str = ""


def load_apart(sources: Sequence[tuple[EntryPoint, str, str]]) -> list[Loaded]:
    """Load each source in a child process, unless its outcome is remembered.

    Args:
        sources: entry point, name and version of its distribution.
    """
    limit_s = seconds(LIMIT_VARIABLE, DEFAULT_LIMIT_S)
    if limit_s <= 0 or not sys.executable:
        return [Loaded()] * len(sources)
    here = [__version__, sys.version, sys.prefix, *summary(files_in(str(Path(__file__).parent))), *installation_state()]
    states = [
        key_of([*here, distribution, version, point.name, point.value, *files_of(re.split("[.:]", point.value)[0])])
        for point, distribution, version in sources
    ]
    tasks = {
        state: Task(f"importing {distribution} {version}", (point.name, point.value))
        for state, (point, distribution, version) in zip(states, sources, strict=True)
    }
    found = outcomes(
        "chatlearn_core.plugins.loader:load_for_trial",
        tasks,
        limit_s=limit_s,
        memory=Memory(cache_file(PROJECT, "plugin-records.json")),
        tried_variable=TRIED_VARIABLE,
        lost_s=LOST_S,
    )
    return [_loaded(found[state]) if state in found else Loaded() for state in states]


def _loaded(outcome: Outcome) -> Loaded:
    if outcome.lost:
        hangs = outcome.lost.startswith("did not end")
        remedy = f". {LIMIT_VARIABLE} sets the limit" if hangs else "; an exception would have been caught"
        retry = f". It is tried again after {LOST_S / 60:.0f} minutes, or when its files change"
        return Loaded(f"its import {outcome.lost}{remedy}{retry}")
    if outcome.patched:
        return Loaded(f"its import replaces {', '.join(outcome.patched)}, which all code in the process uses")
    warning = f"its import changes {', '.join(outcome.changed)}" if outcome.changed else ""
    try:
        records, observers = unpacked(outcome.result, PluginRecord.__module__)
    except ValueError:  # nothing that can be stored: records of the plugin's own classes, or an error to be shown
        return Loaded(warning=warning)
    return Loaded("", records, observers, warning)
