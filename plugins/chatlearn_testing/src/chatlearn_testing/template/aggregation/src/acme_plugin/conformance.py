"""Settings with which the conformance suite tests this package; a run never imports this module."""

from __future__ import annotations

from typing import Any

from chatlearn_testing.suites import AggregationCase

MASKS = ((0, 0, 1, 1, 1, 1), (0, 1), (0, 0, 0))
"""Four tokens and one token are trained on; the third sequence has none."""

SETTINGS: dict[str, dict[str, Any]] = {
    "aggregation/acme": {
        "cases": (
            # Square roots of the lengths: 2 and 1, together 3; the four tokens share 2/3.
            AggregationCase(MASKS, ((0, 0, 1 / 6, 1 / 6, 1 / 6, 1 / 6), (0, 1 / 3), (0, 0, 0))),
            AggregationCase(((0, 1, 0, 1),), ((0, 0.5, 0, 0.5),)),
            AggregationCase(((0, 0),), ((0, 0),)),
        ),
    },
}
