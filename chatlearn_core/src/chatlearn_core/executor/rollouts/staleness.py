"""Staleness: policy versions between the weights that sampled a token and the newest weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from chatlearn_core.exceptions import ContractError
from chatlearn_core.types import Metric, Metrics, Sample, Turn


def fresh_mask(sample: Sample, version: int) -> npt.NDArray[np.bool_]:
    """[T] the loss mask without tokens sampled by a version other than ``version``; the sample's own array if it has
    none.
    """
    mask = sample.loss_mask
    for turn in sample.turns:
        for span in turn.version_spans:
            if span.version != version:
                mask = mask.copy() if mask is sample.loss_mask else mask
                mask[turn.start + span.start : turn.start + span.stop] = False
    return mask


def oldest_version(samples: Iterable[Sample], serving: frozenset[str] | None = None) -> int | None:
    """The oldest policy version that sampled a token of these samples; None if the policy sampled none.

    Args:
        serving: the generators that serve the policy's weights; tokens of others do not count. None: all do.
    """
    return min((span.version for turn in _turns(samples, serving) for span in turn.version_spans), default=None)


def staleness_metrics(samples: Sequence[Sample], policy_version: int, serving: frozenset[str] | None = None) -> Metrics:
    """Versions between the weights that sampled a token and ``policy_version``.

    Args:
        serving: see ``oldest_version``.

    Returns:
        ``rollout/staleness_mean`` (over tokens), ``rollout/staleness_max`` and ``rollout/stale_tokens`` (fraction),
        over the samples that are trained on; empty if none of them has version spans.

    Raises:
        ContractError: a token is of a version that does not exist yet; names the sample.
    """
    trained = [sample for sample in samples if sample.exclusion is None]
    for sample in trained:
        newest = max((span.version for turn in _turns([sample], serving) for span in turn.version_spans), default=0)
        if newest > policy_version:
            raise ContractError(
                f"sample {sample.id!r} has tokens of policy version {newest}, and the newest is {policy_version}: the "
                "generator stamps tokens with versions that it never received"
            )
    ages = [
        (policy_version - span.version, span.stop - span.start)
        for turn in _turns(trained, serving)
        for span in turn.version_spans
    ]
    if not ages:
        return {}
    tokens = sum(length for _, length in ages)
    return {
        "rollout/staleness_mean": Metric(sum(age * length for age, length in ages), tokens),
        "rollout/staleness_max": Metric(max(age for age, _ in ages), reducer="max"),
        "rollout/stale_tokens": Metric(sum(length for age, length in ages if age), tokens),
    }


def _turns(samples: Iterable[Sample], serving: frozenset[str] | None) -> list[Turn]:
    return [turn for s in samples for turn in s.turns if serving is None or turn.generator in serving]
