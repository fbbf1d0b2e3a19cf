"""pluggy's markers for this project, in a module of their own so that the module ``hookspec`` keeps its name."""

from __future__ import annotations

from pluggy import HookimplMarker, HookspecMarker

PROJECT = "chatlearn"
"""pluggy's project name: the prefix of every hook, and the group of the entry points."""

hookimpl = HookimplMarker(PROJECT)
"""Marks a plugin's implementation of a hook."""
hookspec = HookspecMarker(PROJECT)
"""Marks a specification; used by ``hookspec.py`` alone."""
