"""Settings of ``chatlearn plugins check chatlearn-core``: the core does not import the kit."""

from __future__ import annotations

from typing import Any

from chatlearn_core.data import RawExample
from chatlearn_core.types import SamplingParams
from chatlearn_testing.suites import ExampleKindCase


def likeliest(samples: Any, m: Any) -> Any:
    """Calls that add the ids of the likeliest tokens."""
    return m.join(samples, m.trainer.topk(samples, k=4))


TRUNCATED = SamplingParams(max_tokens=7, temperature=0.7, top_k=8, max_kept_ids=8)

SETTINGS: dict[str, dict[str, Any]] = {
    "example_kind/prompts": {"cases": (
        ExampleKindCase(RawExample("2+2?", ground_truth="4", columns={"level": "easy"}), ()),
        ExampleKindCase(RawExample([{"role": "user", "content": "2+2?"}], ground_truth="4"), ()),
        ExampleKindCase(RawExample("2+2?"), None),
    )},
    "flow_method/function.apply": {
        "function": "chatlearn_testing.suites.flow_method_play:shortest", "arguments": {"keep": 1},
    },
    "flow_method/trainer.topk": {"arguments": {"k": 4}},
    "flow_method/trainer.logprobs_at": {"prepare": likeliest, "arguments": {"ids": "trainer_topk_ids"}},
    "flow_method/trainer.truncated_logprobs": {"sampling": TRUNCATED, "arguments": {"kept": "kept_ids"}},
}  # fmt: skip
