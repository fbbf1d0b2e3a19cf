"""Input of the conformance suite; ``chatlearn plugins check`` and the tests read it, a run never does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatlearn_testing.suites import FilterCase

from acme_plugin.sample_filter import REASON

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "sample_filter/acme": {
        "options": {"factor": 2.0},
        "cases": (
            FilterCase("1234"),
            FilterCase("12"),
            FilterCase("123456789012345", excluded=REASON),
            FilterCase("123", group="other"),
        ),
        "bad_options": ({"factor": 1.0}, {"factor": "many"}),
    }
}
