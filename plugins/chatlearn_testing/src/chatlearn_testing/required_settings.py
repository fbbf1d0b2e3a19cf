"""The settings without which a suite could prove nothing: what its author knows of the plugin."""

from __future__ import annotations

from collections.abc import Mapping

from chatlearn_core.plugins.records import Kind

REQUIRED: Mapping[Kind, tuple[str, str]] = {
    "reward": ("cases", "samples with known rewards"),
    "dataset": ("cases", "rows with known examples"),
    "environment": ("cases", "rollouts with known outcomes"),
    "tool": ("cases", "calls with known answers"),
    "launcher": ("cases", "processes with known parts"),
    "model_family": ("cases", "small models with known facts"),
    "schedule": ("values", "steps with known values"),
    "step_policy": ("cases", "steps with known decisions"),
    "aggregation": ("cases", "mini-batches with known weights"),
    "example_kind": ("cases", "rows with known samples"),
    "sample_filter": ("cases", "samples with known exclusions or rewards"),
}
"""Kind -> name of the setting, and what it holds."""
