"""Experience: every sample of a step is counted."""

from __future__ import annotations

from typing import Any

import numpy as np

from chatlearn_core.executor.sample_metrics import sample_metrics
from chatlearn_core.types import Completion, Prompt, Sample, SamplingParams, sample_from_completion

SAMPLING = SamplingParams(8, temperature=0.5, top_p=1.0)


def make_prompt(name: str) -> Prompt:
    return Prompt(name, np.array([1, 2, 3]), "?")


def finished(name: str, length: int, *, reason: Any = "stop", exclusion: str | None = None) -> Sample:
    completion = Completion(
        name, np.arange(length), np.full(length, -1.0, np.float32), SAMPLING.basis, reason, SAMPLING, ()
    )
    sample = sample_from_completion(name, name, make_prompt(name), completion)
    sample.exclusion = exclusion
    return sample


def test_lengths_and_exclusions_are_counted() -> None:
    samples = [
        finished("a", 4),
        finished("b", 8, reason="length"),
        finished("c", 2, exclusion="reward failed: math: KeyError"),
        finished("d", 2, exclusion="reward failed: math: ValueError"),
        finished("e", 4, exclusion="equal rewards"),
    ]
    metrics = {name: metric.value for name, metric in sample_metrics(samples).items()}
    assert metrics == {
        "samples/total": 5,
        "samples/excluded": 3,
        "samples/excluded/reward_failed": 2,
        "samples/excluded/equal_rewards": 1,
        "rollout/discarded_tokens": 8,
        "rollout/discarded_tokens/reward_failed": 4,
        "rollout/discarded_tokens/equal_rewards": 4,
        "prompt_length/mean": 3,
        "response_length/mean": 4,
        "response_length/max": 8,
        "response_length/min": 2,
        "response_length/clip_ratio": 0.2,
    }


def test_what_environments_count_is_a_mean_over_samples() -> None:
    samples = [finished("a", 4), finished("b", 4), finished("c", 4, exclusion="environment failed: it raised")]
    for sample, calls in zip(samples, (1.0, 4.0), strict=False):
        sample.sequence_data |= {"environment/tool_calls": calls, "other": 9.0}
    metrics = {name: metric.value for name, metric in sample_metrics(samples).items()}
    assert metrics["environment/tool_calls"] == 2.5
    assert "other" not in metrics
