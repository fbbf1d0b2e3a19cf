"""How old the weights are that sampled what is trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from chatlearn_core.types import Metric, Metrics, Sample


def newest_version(samples: Sequence[Sample]) -> int | None:
    """The newest policy version that any of the samples' tokens is of: the one that serves in their step."""
    versions = [span.version for s in samples if s.completion is not None for span in s.completion.version_spans]
    return max(versions, default=None)


def fresh_mask(sample: Sample, version: int | None) -> npt.NDArray[np.bool_]:
    """[T] the loss mask without the tokens that another version than ``version`` sampled."""
    mask = sample.loss_mask.copy()
    spans = () if sample.completion is None else sample.completion.version_spans
    for span in spans:
        if span.version != version:
            mask[sample.num_prompt_tokens + span.start : sample.num_prompt_tokens + span.stop] = False
    return mask


def staleness_metrics(samples: Sequence[Sample]) -> Metrics:
    """Versions between the weights that sampled a token and the newest in the step.

    Returns:
        ``rollout/staleness_mean`` (over tokens), ``rollout/staleness_max`` and ``rollout/stale_tokens`` (share), over
        the samples that are trained on; empty if none of them says its versions.
    """
    trained = [sample for sample in samples if sample.exclusion is None and sample.completion is not None]
    newest = newest_version(trained)
    if newest is None:
        return {}
    ages = [
        (newest - span.version, span.stop - span.start)
        for sample in trained
        if sample.completion is not None
        for span in sample.completion.version_spans
    ]
    tokens = sum(length for _, length in ages)
    return {
        "rollout/staleness_mean": Metric(sum(age * length for age, length in ages), tokens),
        "rollout/staleness_max": Metric(max(age for age, _ in ages), reducer="max"),
        "rollout/stale_tokens": Metric(sum(length for age, length in ages if age), tokens),
    }
