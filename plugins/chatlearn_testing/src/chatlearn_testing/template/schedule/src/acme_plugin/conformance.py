"""Input of the conformance suite; ``chatlearn plugins check`` and the tests read it, a run never does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "schedule/acme": {
        "options": {"start": 8.0, "end": 4.0, "first_step": 3, "last_step": 9},
        "values": {1: 8.0, 3: 8.0, 5: 7.0, 6: 6.0, 7: 5.0, 9: 4.0, 10: 4.0, 1000: 4.0},
        "bounds": (4.0, 8.0),
        "bad_options": (
            {"start": 8.0, "end": 4.0, "first_step": 3, "last_step": 3},
            {"start": 8.0, "end": 4.0, "first_step": 0, "last_step": 3},
            {"start": 8.0, "end": 4.0},
        ),
    }
}
