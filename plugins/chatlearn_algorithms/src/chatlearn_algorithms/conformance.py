"""Settings of ``chatlearn plugins check chatlearn-algorithms``; no run imports them."""

from __future__ import annotations

from typing import Any

from chatlearn_testing.suites import AggregationCase

MASKS = ((0, 0, 1, 1), (0, 1, 0), (0, 1, 1, 1), (0, 0))
"""Two, one and three tokens of three sequences are trained on, none of the fourth; six in all."""
GROUPS = (0, 1, 1, 2)
"""The first prompt has two tokens to train on, the second four, the third none."""


def _weighed(first: float, second: float, third: float) -> tuple[AggregationCase, ...]:
    """The case in which the tokens of each sequence have this weight."""
    weights = tuple(tuple(w * bit for bit in mask) for w, mask in zip((first, second, third, 0.0), MASKS, strict=True))
    return (AggregationCase(MASKS, weights, groups=GROUPS),)


SETTINGS: dict[str, dict[str, Any]] = {
    # Their losses hold a factor whose gradient is stopped, so finite differences are not their gradients.
    "algorithm/cispo": {"detaches": True},
    "algorithm/gspo": {"detaches": True},
    "algorithm/gdpo": {
        "options": {"rewards": {"correct": 1, "short": 0.5}},
        "reward_components": ("correct", "short"),
    },
    "aggregation/token_mean": {"cases": _weighed(1 / 6, 1 / 6, 1 / 6)},
    "aggregation/seq_mean_token_mean": {"cases": _weighed(1 / 6, 1 / 3, 1 / 9)},
    "aggregation/seq_mean_token_sum": {"cases": _weighed(1 / 3, 1 / 3, 1 / 3)},
    "aggregation/seq_mean_token_sum_norm": {
        "options": {"constant_length": 8},
        "cases": _weighed(1 / 24, 1 / 24, 1 / 24),
    },
    "aggregation/prompt_mean": {"cases": _weighed(1 / 4, 1 / 8, 1 / 8)},
}
