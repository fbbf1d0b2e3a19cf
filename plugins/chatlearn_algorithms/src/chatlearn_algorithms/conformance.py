"""Settings of ``chatlearn plugins check chatlearn-algorithms``; no run imports them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from chatlearn_core.data import RawExample
from chatlearn_testing.suites import AggregationCase, ExampleKindCase, FilterCase, StepCase

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
    "schedule/linear": {
        "options": {"start": 2.0, "end": -1.0, "first_step": 5, "last_step": 11},
        "values": {1: 2.0, 5: 2.0, 6: 1.5, 8: 0.5, 11: -1.0, 12: -1.0, 500: -1.0},
        "bounds": (-1.0, 2.0),
        "bad_options": (
            {"start": 1.0, "end": 0.0, "first_step": 5, "last_step": 5},
            {"start": 1.0, "end": 0.0, "first_step": 0, "last_step": 5},
            {"start": 1.0, "end": 0.0},
        ),
    },
    "step_policy/early_stop": {
        "options": {"metric": "eval/accuracy", "patience": 2, "min_improvement": 0.125, "goal": 0.875},
        "cases": (
            StepCase({"eval/accuracy": 0.25}),
            StepCase(),
            StepCase({"eval/accuracy": 0.5}),
            StepCase({"eval/accuracy": 0.5625}),
            StepCase(),
            StepCase({"eval/accuracy": 0.25}, stop="has not improved on 0.5 in its last 2 measurements"),
            StepCase({"eval/accuracy": 0.75}),
            StepCase({"eval/accuracy": 0.875}, stop="its goal 0.875"),
        ),
        "bad_options": ({"mode": "best"}, {"patience": 0}, {"min_improvement": -1.0}),
    },
    "sample_filter/truncated": {
        "cases": (FilterCase("the end"), FilterCase("cut o", finish_reason="length", excluded="truncated")),
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
