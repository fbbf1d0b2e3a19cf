"""``summary.json``: the results of a run for users and programs."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

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


def summary(
    *,
    name: str,
    status: str,
    steps: int,
    planned_steps: int,
    before: Mapping[str, float],
    after: Mapping[str, float],
    totals: Mapping[str, float],
    best: Mapping[str, Any] | None,
    model: str | None,
    checkpoint: str | None,
    wall_s: float,
    error: str | None,
    registry: PluginRegistry,
) -> dict[str, Any]:
    """The content of ``summary.json``."""
    return {
        "name": name,
        "status": status,
        "steps": steps,
        "planned_steps": planned_steps,
        **before_and_after(before, after),
        "totals": dict(totals),
        "best": best,
        "model": model,
        "checkpoint": checkpoint,
        "wall_s": round(wall_s, 3),
        "error": error,
        "versions": versions(registry),
    }
