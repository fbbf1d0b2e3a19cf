"""What a person should hear at once, and what stops a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from chatlearn_core.exceptions import BackendError
from chatlearn_core.executor.alarms import EQUAL_REWARDS_STEPS, JUMP_STEPS, MISMATCH_PROB_DIFF, TREND_STEPS, Alarms
from chatlearn_core.executor.step_samples import Experience
from chatlearn_core.types import UNGRADED, Prompt, RewardResult, Sample

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def experience(*rewards: float | str | None, step: int = 1) -> Experience:
    """Samples by their reward, or by why they are excluded."""
    samples = []
    for i, reward in enumerate(rewards):
        ids = np.array([1, 2])
        sample = Sample(f"s{i}", "g", Prompt("p", ids, "?"), ids, ids > 1)
        if isinstance(reward, str):
            sample.exclusion = reward
        else:
            sample.reward = RewardResult(reward)
        samples.append(sample)
    return Experience(step, samples, {})


def test_all_is_well() -> None:
    assert Alarms().check(experience(0.0, 1.0), {"samples/excluded": 0.0}) == []


def test_exclusions_are_told_with_their_reasons() -> None:
    step = experience(1.0, 0.0, "reward failed: A", "reward failed: B", "reward failed: A")
    [sentence] = Alarms().check(step, {"samples/excluded": 3.0})
    assert sentence == (
        "3 of 5 samples excluded: 2 x reward failed: A (first: sample s2); 1 x reward failed: B (first: sample s3)"
    )


def test_samples_that_were_too_hard_to_judge_are_told() -> None:
    step = experience(1.0, 0.0, 0.0)
    step.samples[1].reward = RewardResult(0.0, {UNGRADED: 1.0})
    [sentence] = Alarms().check(step, {})
    assert sentence.startswith(
        "1 of 3 samples took too much time or memory to judge and count as wrong (first: sample s1)"
    )


def test_equal_rewards_are_told_after_some_steps_in_a_row() -> None:
    alarms = Alarms()
    for _ in range(EQUAL_REWARDS_STEPS - 1):
        assert alarms.check(experience(0.0, 0.0), {}) == []
    assert "every reward of the last 3 steps is 0.0" in alarms.check(experience(0.0, 0.0), {})[0]
    assert alarms.check(experience(0.0, 1.0), {}) == [], "a spread starts the count again"
    assert alarms.check(experience(0.0, 0.0), {}) == []


def test_steps_that_are_equal_within_and_differ_between_are_no_standstill() -> None:
    alarms = Alarms()
    for value in (0.0, 1.0, 0.0, 1.0):
        assert alarms.check(experience(value, value), {}) == []


def test_groups_that_are_equal_within_are_told_after_some_steps_in_a_row() -> None:
    """Two groups, one all right and one all wrong: no completion is better than another of its group."""
    alarms, step, metrics = Alarms(), experience(0.0, 0.0, 1.0, 1.0), {"zero_spread_groups": 1.0}
    for _ in range(EQUAL_REWARDS_STEPS - 1):
        assert alarms.check(step, metrics) == []
    [sentence] = alarms.check(step, metrics)
    assert sentence.startswith("for 3 steps the rewards within each group have been equal, although groups differ")
    assert "raise algorithm.options.group_size or sampling.temperature" in sentence
    assert alarms.check(step, {"zero_spread_groups": 0.5}) == [], "one group with a difference starts the count again"
    assert alarms.check(step, metrics) == []


def test_equal_rewards_are_told_once() -> None:
    alarms = Alarms()
    for _ in range(EQUAL_REWARDS_STEPS):
        told = alarms.check(experience(0.0, 0.0), {"zero_spread_groups": 1.0})
    assert len(told) == 1
    assert told[0].startswith("every reward of the last 3 steps is 0.0")


def test_rewards_of_tokens_that_differ_are_no_standstill() -> None:
    alarms, step = Alarms(), experience(0.0, 0.0)
    step.samples[0].reward = RewardResult(0.0, token_values=np.array([0.0, 0.5], np.float32))
    for _ in range(EQUAL_REWARDS_STEPS + 1):
        assert alarms.check(step, {}) == []


def test_demonstrations_have_no_rewards_to_worry_about() -> None:
    alarms, step = Alarms(), experience()
    for _ in range(5):
        assert alarms.check(step, {}) == []


@pytest.mark.parametrize(("difference", "told"), [(MISMATCH_PROB_DIFF * 0.9, False), (MISMATCH_PROB_DIFF * 1.1, True)])
def test_a_generator_that_disagrees_with_the_trainer_is_told(difference: float, told: bool) -> None:
    sentences = Alarms().check(experience(0.0, 1.0), {"mismatch/prob_diff_mean": difference})
    assert bool(sentences) == told
    assert all("generator and trainer disagree" in sentence for sentence in sentences)


def test_a_jump_of_the_difference_is_told_with_what_may_have_changed() -> None:
    alarms = Alarms()
    for _ in range(JUMP_STEPS[0]):
        assert alarms.mismatch({"mismatch/prob_diff_mean": 0.002}) == []
    assert alarms.mismatch({"mismatch/prob_diff_mean": 0.009}) == [], "less than five times the median of 0.002"
    [sentence] = alarms.mismatch({"mismatch/prob_diff_mean": 0.012})
    assert "jumped: mean probability difference 0.012, median of the 6 steps before 0.002." in sentence
    assert "a weight sync that failed in part" in sentence


def test_a_jump_below_rounding_or_without_a_history_is_none() -> None:
    alarms = Alarms()
    for _ in range(10):
        assert alarms.mismatch({"mismatch/prob_diff_mean": 1e-6}) == []
    assert alarms.mismatch({"mismatch/prob_diff_mean": 9e-4}) == [], "nine hundred times as much, and still rounding"
    assert Alarms().mismatch({"mismatch/prob_diff_mean": 0.04}) == [], "there is nothing to compare it with"
    assert Alarms().mismatch({}) == []


def test_a_difference_that_stays_is_the_new_normal() -> None:
    alarms = Alarms()
    for _ in range(JUMP_STEPS[1]):
        alarms.mismatch({"mismatch/prob_diff_mean": 0.002})
    told = [bool(alarms.mismatch({"mismatch/prob_diff_mean": 0.03})) for _ in range(JUMP_STEPS[1])]
    assert told[0]
    assert not told[-1]


def test_the_alarm_says_whether_staleness_grows_or_the_engines_differ() -> None:
    alarms = Alarms()
    for _ in range(JUMP_STEPS[0]):
        assert alarms.mismatch({"mismatch/prob_diff_mean": 0.002, "mismatch/stale_prob_diff_mean": 0.01}) == []
    [stale] = alarms.mismatch({"mismatch/prob_diff_mean": 0.002, "mismatch/stale_prob_diff_mean": 0.06})
    assert stale.startswith("tokens of older weights are further from the policy than before")
    assert (
        "difference 0.06 (tokens of the current weights: 0.002), median of earlier steps 0.01. Staleness grows" in stale
    )
    [engine] = alarms.mismatch({"mismatch/prob_diff_mean": 0.02, "mismatch/stale_prob_diff_mean": 0.02})
    assert engine.startswith("the difference between generator and trainer jumped")
    [only_stale] = alarms.mismatch({"mismatch/stale_prob_diff_mean": 0.2})
    assert "mean probability difference 0.2, median" in only_stale


def kl_over(values: Sequence[float], name: str = "mismatch/stale_kl", alarms: Alarms | None = None) -> list[list[str]]:
    """The sentences of steps with these values."""
    alarms = alarms or Alarms()
    return [alarms.mismatch({name: value}) for value in values]


def noisy(values: Sequence[float]) -> list[float]:
    """Each value times a factor between 0.7 and 1.3."""
    factors = np.random.Generator(np.random.Philox(3)).uniform(0.7, 1.3, len(values))
    return [value * factor for value, factor in zip(values, factors, strict=True)]


@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("mismatch/stale_kl", "tokens of older weights move away from the policy: KL from "),
        (
            "mismatch/kl",
            "the difference between generator and trainer grows: KL of tokens of the current weights from ",
        ),
    ],
)
def test_what_grows_slowly_is_told_once_in_a_while_and_says_which(name: str, beginning: str) -> None:
    grows = noisy([0.0005 * 1.1**step for step in range(2 * TREND_STEPS)])
    told = [step for step, sentences in enumerate(kl_over(grows, name), 1) if sentences]
    assert told == [TREND_STEPS, 2 * TREND_STEPS]
    [sentence] = kl_over(grows[:TREND_STEPS], name)[-1]
    assert sentence.startswith(beginning)
    assert f"nats in {TREND_STEPS} steps" in sentence


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(noisy([0.01] * 100), id="noise"),
        pytest.param([1e-7 * 1.1**step for step in range(60)], id="rounding"),
        pytest.param(noisy([min(step, 8) * 0.002 for step in range(1, 100)]), id="staleness at the start"),
        pytest.param(noisy([0.02 * 0.9**step for step in range(60)]), id="falls"),
    ],
)
def test_what_does_not_grow_is_not_told(values: list[float]) -> None:
    assert kl_over(values) == [[]] * len(values)


def test_stale_tokens_have_a_bound() -> None:
    """The mean KL of the recorded runs of ``benchmarks/async_learning.py``: only those that lose accuracy warn."""
    runs = json.loads((BENCHMARKS / "results" / "async_learning.json").read_text())["runs"]
    told = {name: [bool(kl_over([one["stale_kl"]])[0]) for one in of_seeds] for name, of_seeds in runs.items()}
    assert {name for name, of_seeds in told.items() if all(of_seeds)} == {
        "staleness 4, uncorrected",
        "staleness 8, corrected",
        "staleness 8, uncorrected",
    }
    assert {name for name, of_seeds in told.items() if not any(of_seeds)} == runs.keys() - {
        name for name, of_seeds in told.items() if all(of_seeds)
    }


def test_a_run_that_resumes_remembers_earlier_steps() -> None:
    """Of differences and of rewards that are equal."""
    alarms, resumed = Alarms(), Alarms()
    for _ in range(EQUAL_REWARDS_STEPS - 1):
        alarms.check(experience(0.0, 0.0), {})
    for _ in range(JUMP_STEPS[0]):
        alarms.mismatch({"mismatch/prob_diff_mean": 0.002, "mismatch/stale_kl": 0.01})
    resumed.load_state_dict(json.loads(json.dumps(alarms.state_dict())))
    told = resumed.check(experience(0.0, 0.0), {"mismatch/prob_diff_mean": 0.012})
    assert len(told) == 2
    assert resumed.state_dict()["earlier"]["mismatch/stale_kl"] == [0.01] * JUMP_STEPS[0]


def test_a_step_whose_samples_all_failed_stops_the_run() -> None:
    step = experience("reward failed: A", "generation failed: B", "generation timed out: C", "reward failed: A", step=7)
    with pytest.raises(BackendError, match=r"all 4 samples of step 7 failed; most frequent reason: 2 x reward failed"):
        Alarms().check(step, {})


def test_a_step_that_merely_teaches_nothing_does_not() -> None:
    assert Alarms().check(experience("equal rewards", "equal rewards"), {"samples/excluded": 2.0})
    assert Alarms().check(experience("reward failed: A", 1.0), {"samples/excluded": 1.0})


def test_tokens_without_probability_are_told() -> None:
    [sentence] = Alarms().mismatch({"mismatch/prob_diff_mean": 0.001, "mismatch/infinite": 0.02})
    assert sentence.startswith("2.0% of the sampled tokens have no finite logprob")
    assert Alarms().mismatch({"mismatch/prob_diff_mean": 0.001, "mismatch/infinite": 0.0}) == []
