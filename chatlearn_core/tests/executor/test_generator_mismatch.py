"""The mismatch is measured where the logprobs of trainer and generator are of the same distribution and weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from chatlearn_core.executor.generator_mismatch import both_logprobs, compare_logprobs
from chatlearn_core.types import (
    Completion,
    LogprobBasis,
    Metrics,
    Prompt,
    Sample,
    SamplingParams,
    VersionSpan,
    pack_samples,
    sample_from_completion,
)

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


def mismatch(samples: list[Sample], sampling: SamplingParams) -> Metrics:
    basis = LogprobBasis(sampling.temperature or 1.0)
    batch = pack_samples(both_logprobs(samples, basis, "trainer_logprobs", policy_version=7))
    return compare_logprobs(batch).metrics if batch.num_sequences else {}


def test_the_mismatch_is_measured_where_both_logprobs_are_of_one_distribution() -> None:
    sample = finished("a", 2)
    sample.token_data["trainer_logprobs"] = np.array([0, 0, 0, -1.0, -1.5], np.float32)
    metrics = mismatch([sample], SAMPLING)
    difference = abs(torch.tensor([-1.0, -1.5]).exp() - torch.tensor([-1.0, -1.0]).exp()).mean()
    assert metrics["mismatch/prob_diff_mean"].value == pytest.approx(float(difference), rel=1e-6)


def test_tokens_that_older_weights_sampled_are_no_mismatch() -> None:
    sample = finished("a", 2)
    sample.turns = (replace(sample.turns[0], version_spans=(VersionSpan(0, 1, 6), VersionSpan(1, 2, 7))),)
    sample.token_data["trainer_logprobs"] = np.array([0, 0, 0, -9.0, -1.0], np.float32)
    metrics = mismatch([sample], SAMPLING)
    assert metrics["mismatch/logprob_diff_max"].value == 0.0, "the first token's weights are not the trainer's"
    assert metrics["mismatch/stale_logprob_diff_max"].value == 8.0, "-9 against -1"
    difference = math.exp(-1.0) - math.exp(-9.0)
    assert metrics["mismatch/stale_prob_diff_mean"].value == pytest.approx(difference, rel=1e-6)
    assert sample.loss_mask.sum() == 2, "it is still trained on"


def test_no_mismatch_is_claimed_between_different_distributions() -> None:
    sample = finished("a", 2)
    sample.token_data["trainer_logprobs"] = np.zeros(5, np.float32)
    assert mismatch([sample], SamplingParams(8, top_p=0.9)) == {}, "the trainer does not cut to top-p"
    assert mismatch([finished("a", 2)], SAMPLING) == {}, "there are no trainer logprobs"


def test_raw_logprobs_are_compared_where_sampling_cut_the_distribution() -> None:
    cut = SamplingParams(8, top_p=0.9)
    completion = Completion(
        "a", np.arange(2), np.full(2, -0.1, np.float32), cut.basis, "stop", cut, (), np.full(2, -1.0, np.float32)
    )
    sample = sample_from_completion("a", "a", make_prompt("a"), completion)
    sample.token_data["trainer_logprobs"] = np.array([0, 0, 0, -1.0, -1.5], np.float32)
    difference = (math.exp(-1.0) - math.exp(-1.5)) / 2
    metrics = mismatch([sample], cut)
    assert metrics["mismatch/prob_diff_mean"].value == pytest.approx(difference, rel=1e-6)
    warm = SamplingParams(8, temperature=0.5, top_p=0.9)
    assert mismatch([sample], warm) == {}, "the trainer's are of temperature 0.5, the raw ones are not"


def test_what_a_completion_says_of_its_basis_counts_and_not_what_was_asked_for() -> None:
    good, strange = finished("a", 2), finished("b", 2)
    for sample in (good, strange):
        sample.token_data["trainer_logprobs"] = np.array([0, 0, 0, -1.0, -1.0], np.float32)
    strange.turns = (replace(strange.turns[0], basis=SamplingParams(8, 0.5, top_k=5).basis),)
    strange.token_data["generator_logprobs"] = np.zeros(5, np.float32)
    assert mismatch([good, strange], SAMPLING)["mismatch/prob_diff_mean"].value == 0.0
    assert mismatch([strange], SAMPLING) == {}
