"""Staleness: counted by token, against the policy's version."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from chatlearn_core.exceptions import ContractError
from chatlearn_core.executor.rollouts.staleness import fresh_mask, oldest_version, staleness_metrics
from chatlearn_core.types import (
    RAW_BASIS,
    Completion,
    Prompt,
    Sample,
    SamplingParams,
    VersionSpan,
    sample_from_completion,
)


def sample_of(*spans: tuple[int, int], exclusion: str | None = None) -> Sample:
    """(version, tokens) after another."""
    bounds = np.cumsum([0, *(length for _, length in spans)]).tolist()
    count = bounds[-1]
    completion = Completion(
        request_id="r",
        token_ids=np.arange(count),
        logprobs=np.zeros(count, np.float32),
        basis=RAW_BASIS,
        finish_reason="stop",
        sampling=SamplingParams(99),
        version_spans=tuple(
            VersionSpan(start, start + length, version)
            for start, (version, length) in zip(bounds[:-1], spans, strict=True)
        ),
    )
    sample = sample_from_completion("r", "g", Prompt("p", np.array([1, 2]), "?"), completion)
    sample.exclusion = exclusion
    return sample


def test_staleness_is_the_mean_and_maximum_over_tokens() -> None:
    samples = [sample_of((3, 2), (5, 4)), sample_of((5, 3)), sample_of((4, 1)), sample_of((0, 99), exclusion="failed")]
    metrics = {name: metric.value for name, metric in staleness_metrics(samples, 5).items()}
    assert metrics == pytest.approx(
        {"rollout/staleness_mean": 5 / 10, "rollout/staleness_max": 2, "rollout/stale_tokens": 3 / 10}
    )


def test_a_generator_that_is_never_synchronised_is_not_stale() -> None:
    rival, own = sample_of((0, 4)), sample_of((6, 2))
    rival.turns = (replace(rival.turns[0], generator="rival"),)
    own.turns = (replace(own.turns[0], generator="generator"),)
    serving = frozenset({"generator"})
    assert staleness_metrics([rival, own], 7, serving)["rollout/staleness_max"].value == 1
    assert staleness_metrics([rival], 7, serving) == {}
    assert (oldest_version([rival, own], serving), oldest_version([rival, own])) == (6, 0)


def test_nothing_is_said_of_samples_without_versions() -> None:
    demonstration = Sample("d", "g", Prompt("p", np.array([1]), "?"), np.array([1, 2]), np.array([False, True]))
    assert staleness_metrics([demonstration, sample_of()], 3) == {}
    assert oldest_version([demonstration]) is None


def test_the_fresh_mask_keeps_tokens_of_one_version() -> None:
    sample = sample_of((3, 2), (5, 3))
    assert fresh_mask(sample, 5).tolist() == [False] * 4 + [True] * 3
    assert fresh_mask(sample, 3).tolist() == [False, False, True, True, False, False, False]
    assert sample.loss_mask.tolist() == [False] * 2 + [True] * 5, "the sample's own mask is not touched"


def test_a_version_that_does_not_exist_yet_is_refused() -> None:
    with pytest.raises(ContractError, match="sample 'r' has tokens of policy version 99999, and the newest is 3"):
        staleness_metrics([sample_of((2, 3)), sample_of((3, 1), (99999, 2))], 3)
    staleness_metrics([sample_of((99999, 2), exclusion="failed")], 3)
