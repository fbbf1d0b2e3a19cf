"""A filter that excludes completions cut off by the length limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chatlearn_algorithms.decision_options import TruncatedOptions
from chatlearn_core.protocols import SampleFilter
from chatlearn_core.types import Sample

REASON = "truncated"


class Truncated(SampleFilter):
    """Excludes samples whose last turn ended by length (DAPO, arXiv 2503.14476, section 3.4: overlong filtering).

    A truncated answer might have become right, so its reward says nothing about its tokens.
    """

    def __init__(self, options: TruncatedOptions) -> None:
        self.options = options

    def excluded(self, samples: Sequence[Sample]) -> Mapping[str, str]:
        return {sample.id: REASON for sample in samples if sample.turns and sample.turns[-1].finish_reason == "length"}
