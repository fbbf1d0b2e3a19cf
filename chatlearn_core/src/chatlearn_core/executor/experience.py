"""The experience that one step trains on: its samples with everything computed for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from chatlearn_core.batching import SamplePacker
from chatlearn_core.types import UNGRADED, Metric, Metrics, Sample


@dataclass(slots=True)
class Experience:
    """The samples of one step. Samples with an ``exclusion`` are not trained on, but counted."""

    step: int
    samples: list[Sample]
    metrics: Metrics
    packer: SamplePacker = field(default_factory=SamplePacker)
    """Packs the samples, and knows what of them is packed already."""

    @property
    def admitted(self) -> list[Sample]:
        """The samples that are trained on."""
        return [sample for sample in self.samples if sample.exclusion is None]


def sample_metrics(samples: Sequence[Sample]) -> Metrics:
    """Lengths and outcomes of the samples."""
    metrics: Metrics = exclusion_metrics(samples)
    metrics["prompt_length/mean"] = Metric(sum(s.num_prompt_tokens for s in samples), len(samples))
    if ungraded := sum(s.reward is not None and UNGRADED in s.reward.components for s in samples):
        metrics["samples/ungraded"] = Metric(ungraded, reducer="sum")
    lengths = [s.num_completion_tokens for s in samples if s.loss_mask.any()]
    if lengths:
        metrics["response_length/mean"] = Metric(sum(lengths), len(lengths))
        metrics["response_length/max"] = Metric(max(lengths), reducer="max")
        metrics["response_length/min"] = Metric(min(lengths), reducer="min")
    ends = [s.last_turn.finish_reason for s in samples if s.last_turn is not None]
    if ends:
        metrics["response_length/clip_ratio"] = Metric(ends.count("length"), len(ends))
    return metrics


def exclusion_metrics(samples: Sequence[Sample]) -> Metrics:
    """``samples/total``, ``samples/excluded`` and the number excluded for each reason."""
    metrics: Metrics = {
        "samples/total": Metric(len(samples), reducer="sum"),
        "samples/excluded": Metric(sum(s.exclusion is not None for s in samples), reducer="sum"),
    }
    for reason, count in Counter(s.exclusion.split(":")[0] for s in samples if s.exclusion).items():
        metrics[f"samples/excluded/{reason.replace(' ', '_')}"] = Metric(count, reducer="sum")
    return metrics
