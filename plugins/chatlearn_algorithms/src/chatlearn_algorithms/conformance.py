"""Settings of ``chatlearn plugins check chatlearn-algorithms``; no run imports them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from chatlearn_core.data import RawExample
from chatlearn_testing.suites import AggregationCase, ExampleKindCase

MASKS = ((0, 0, 1, 1), (0, 1, 0), (0, 1, 1, 1), (0, 0))
"""Two, one and three tokens of three sequences are trained on, none of the fourth; six in all."""
GROUPS = (0, 1, 1, 2)
"""The first prompt has two tokens to train on, the second four, the third none."""


def _weighed(first: float, second: float, third: float) -> tuple[AggregationCase, ...]:
    """The case in which the tokens of each sequence have this weight."""
    weights = tuple(tuple(w * bit for bit in mask) for w, mask in zip((first, second, third, 0.0), MASKS, strict=True))
    return (AggregationCase(MASKS, weights, groups=GROUPS),)


CHAT = [{"role": "user", "content": "2+2?"}]
DIALOGUE = [
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes"},
]
RANKED = RawExample("2+2?", completions=("4", "5"), ranks=(1.0, 0.0))
RANKED_DATA = ({"rank": 1.0}, {"rank": 0.0})
LABELLED = RawExample("2+2?", completions=("4",), labels=(True,))
EQUAL = RawExample("2+2?", completions=("4", "5"), ranks=(1.0, 1.0))

SETTINGS: dict[str, dict[str, Any]] = {
    # Their losses hold a factor whose gradient is stopped, so finite differences are not their gradients.
    "algorithm/cispo": {"detaches": True},
    "algorithm/gspo": {"detaches": True},
    "algorithm/gdpo": {
        "options": {"rewards": {"correct": 1, "short": 0.5}},
        "reward_components": ("correct", "short"),
    },
    "example_kind/demonstrations": {
        "cases": (
            ExampleKindCase(RawExample("2+2?", completion="4", ground_truth="4"), ("4",)),
            ExampleKindCase(RawExample("2+2?", completion="5"), ("5",)),
            ExampleKindCase(RawExample(CHAT, completion=DIALOGUE), ("4Yes",)),
            ExampleKindCase(RawExample("2+2?"), None),
        )
    },
    "example_kind/preferences": {
        "cases": (
            ExampleKindCase(RANKED, ("4", "5"), RANKED_DATA, one_unit=True),
            ExampleKindCase(replace(RANKED, ranks=(0.0, 1.0)), ("4", "5"), RANKED_DATA[::-1], one_unit=True),
            ExampleKindCase(replace(LABELLED, prompt=CHAT), ("4",), ({"label": 1.0},)),
            ExampleKindCase(EQUAL, None),
        )
    },
    "example_kind/ranked_completions": {
        "cases": (
            ExampleKindCase(RANKED, ("4", "5"), RANKED_DATA, one_unit=True),
            ExampleKindCase(replace(RANKED, completions=("4", "3")), ("4", "3"), RANKED_DATA, one_unit=True),
            ExampleKindCase(LABELLED, None),
        )
    },
    "example_kind/labelled_completions": {
        "cases": (
            ExampleKindCase(RANKED, ("4", "5"), ({"label": 1.0}, {"label": 0.0}), one_unit=True),
            ExampleKindCase(LABELLED, ("4",), ({"label": 1.0},)),
            ExampleKindCase(replace(LABELLED, labels=(False,)), ("4",), ({"label": 0.0},)),
            ExampleKindCase(RawExample("2+2?", completions=("4", "5", "6"), ranks=(2.0, 1.0, 0.0)), None),
        )
    },
    "flow_method/trainer.text_logprobs": {"arguments": {"student": "trainer"}},
    "aggregation/token_mean": {"cases": _weighed(1 / 6, 1 / 6, 1 / 6)},
    "aggregation/seq_mean_token_mean": {"cases": _weighed(1 / 6, 1 / 3, 1 / 9)},
    "aggregation/seq_mean_token_sum": {"cases": _weighed(1 / 3, 1 / 3, 1 / 3)},
    "aggregation/seq_mean_token_sum_norm": {
        "options": {"constant_length": 8},
        "cases": _weighed(1 / 24, 1 / 24, 1 / 24),
    },
    "aggregation/prompt_mean": {"cases": _weighed(1 / 4, 1 / 8, 1 / 8)},
}
