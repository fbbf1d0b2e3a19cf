from __future__ import annotations

import asyncio

import numpy as np
import pytest
from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import (
    RAW_BASIS,
    Completion,
    Prompt,
    RewardResult,
    Sample,
    SamplingParams,
    sample_from_completion,
)
from chatlearn_testing.suites import RewardConformance

from acme_plugin.conformance import SETTINGS
from acme_plugin.options import AcmeOptions
from acme_plugin.reward import AcmeReward


class TestConformance(RewardConformance):
    backend = "acme"
    options = SETTINGS["reward/acme"]["options"]
    cases = SETTINGS["reward/acme"]["cases"]


def make_sample(text: str, num_tokens: int, ground_truth: object = None) -> Sample:
    token_ids = np.zeros(num_tokens, dtype=np.int64)
    logprobs = np.zeros(num_tokens, dtype=np.float32)
    sampling = SamplingParams(max_tokens=num_tokens)
    completion = Completion("r", token_ids, logprobs, RAW_BASIS, "stop", sampling, (), text=text)
    return sample_from_completion(
        "s", "g", Prompt("p", np.zeros(2, dtype=np.int64), "", ground_truth=ground_truth), completion
    )


def score(sample: Sample, **options: object) -> RewardResult:
    chosen = AcmeOptions.model_validate(options)
    reward = AcmeReward(chosen, RoleContext("reward"))
    reward.setup()
    (result,) = asyncio.run(reward.score([sample]))
    reward.close()
    return result


@pytest.mark.parametrize(("text", "coverage"), [("red and Blue", 1.0), ("red", 0.5), ("", 0.0)])
def test_coverage_is_the_share_of_keywords(text: str, coverage: float) -> None:
    result = score(make_sample(text, 3), keywords=["red", "blue"])
    assert result.value == result.components["coverage"] == coverage


def test_tokens_beyond_the_budget_cost() -> None:
    result = score(make_sample("red", 7), keywords=["red"], length_budget=4, length_penalty=0.1)
    assert result.value == pytest.approx(1.0 - 3 * 0.1)
    assert result.components["length_penalty"] == pytest.approx(-0.3)


def test_without_the_option_the_ground_truth_holds_the_keywords() -> None:
    assert score(make_sample("a green hill", 3, ground_truth="green")).value == 1.0


@pytest.mark.parametrize("ground_truth", [None, 7, [], [1]])
def test_a_ground_truth_that_holds_none_marks_the_sample(ground_truth: object) -> None:
    result = score(make_sample("red", 3, ground_truth=ground_truth))
    assert result.value is None
    assert repr(ground_truth) in str(result.error)
