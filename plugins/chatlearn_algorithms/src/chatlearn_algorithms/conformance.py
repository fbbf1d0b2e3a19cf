"""Settings of ``chatlearn plugins check chatlearn-algorithms``; no run imports them."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    # Their losses hold a factor whose gradient is stopped, so finite differences are not their gradients.
    "algorithm/cispo": {"detaches": True},
    "algorithm/gspo": {"detaches": True},
    "algorithm/gdpo": {
        "options": {"rewards": {"correct": 1, "short": 0.5}},
        "reward_components": ("correct", "short"),
    },
}
