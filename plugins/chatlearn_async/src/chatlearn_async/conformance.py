"""Settings of ``chatlearn plugins check chatlearn-async``; runs never import this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    # Replicas load weights in turns, and timing decides which tokens of a completion are sampled before.
    "rollout_mode/async": {"repeatable": False, "overrides": ("weight_sync.fleet_rule=rolling",)},
}
"""``kind/name`` -> attributes of the suite."""
