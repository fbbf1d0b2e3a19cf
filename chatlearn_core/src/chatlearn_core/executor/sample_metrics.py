"""Metrics of a step's samples: lengths, outcomes, exclusions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from chatlearn_core.executor.step_samples import num_sampled_tokens
from chatlearn_core.types import UNGRADED, Metric, Metrics, Sample

ENVIRONMENT = "environment/"
"""Begins the names in ``sequence_data`` by which environments count; their means over the samples are metrics."""

DISCARDED = "rollout/discarded_tokens"


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
    for name in sorted({name for s in samples for name in s.sequence_data if name.startswith(ENVIRONMENT)}):
        counts = [s.sequence_data[name] for s in samples if name in s.sequence_data]
        metrics[name] = Metric(sum(counts), len(counts))
    return metrics


def exclusion_metrics(samples: Sequence[Sample]) -> Metrics:
    """``samples/total``, ``samples/excluded`` and the number excluded for each reason; the same of excluded samples'
    sampled tokens (``rollout/discarded_tokens``).
    """
    metrics: Metrics = {
        "samples/total": Metric(len(samples), reducer="sum"),
        "samples/excluded": Metric(sum(s.exclusion is not None for s in samples), reducer="sum"),
    }
    counts, tokens = Counter[str](), Counter[str]()
    for sample in samples:
        if sample.exclusion is not None:
            reason = sample.exclusion.split(":")[0].replace(" ", "_")
            counts[f"samples/excluded/{reason}"] += 1
            tokens.update(dict.fromkeys((DISCARDED, f"{DISCARDED}/{reason}"), num_sampled_tokens([sample])))
    return metrics | {name: Metric(count, reducer="sum") for name, count in (counts + tokens).items()}
