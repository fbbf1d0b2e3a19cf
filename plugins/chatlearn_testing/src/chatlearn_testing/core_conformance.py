"""Settings of ``chatlearn plugins check chatlearn-core``: the core does not import the kit."""

from __future__ import annotations

from typing import Any

import torch

from chatlearn_core.data import RawExample
from chatlearn_core.types import SamplingParams
from chatlearn_testing.suites import ExampleKindCase
from chatlearn_testing.suites.algorithm_roles import VOCAB


def likeliest(samples: Any, m: Any) -> Any:
    """Calls that add the ids of the likeliest tokens."""
    return m.join(samples, m.trainer.topk(samples, k=4))


def ids_with_the_token(name: str, count: int, generator: torch.Generator) -> torch.Tensor:
    """The ids that tokens may be sampled from: all, so that each token is among them."""
    return torch.arange(VOCAB).expand(count, VOCAB)


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
    "output/truncated_logprobs": {"draw_data": ids_with_the_token},
    "flow_method/trainer.topk": {"arguments": {"k": 4}},
    "flow_method/trainer.logprobs_at": {"prepare": likeliest, "arguments": {"ids": "trainer_topk_ids"}},
    "flow_method/trainer.truncated_logprobs": {"sampling": TRUNCATED, "arguments": {"kept": "kept_ids"}},
}  # fmt: skip
