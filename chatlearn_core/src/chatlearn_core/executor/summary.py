"""Parts of ``summary.json``: versions, and evaluations before and after training."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

from chatlearn_core.plugins.registry import PluginRegistry


def versions(registry: PluginRegistry) -> dict[str, str]:
    """Versions of Python, torch and every distribution with a plugin in use."""
    found = {"python": platform.python_version(), "torch": metadata.version("torch")}
    for entry in registry.entries:
        if entry.status == "ok" and entry.version:
            found[entry.distribution] = entry.version
    return dict(sorted(found.items()))


def before_and_after(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """``{"eval/accuracy": {"before": ..., "after": ...}, ...}`` for every eval metric that was measured twice."""
    return {
        name: {"before": before[name], "after": after[name]}
        for name in sorted(before.keys() & after.keys())
        if name.startswith("eval/")
    }
