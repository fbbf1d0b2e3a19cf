"""The estimators equal brute-force enumeration of all subsets; intervals cover what they claim to."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatlearn_core.executor.repeated_sampling import best_of_k, bootstrap_intervals, majority_at_k, pass_at_k

Answers = list[tuple[str | None, bool]]

answers = st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.booleans()), min_size=1, max_size=7)


def majority_by_enumeration(samples: Answers, k: int) -> float:
    """The mean over all subsets of k samples of the share of right answers among the most frequent ones."""
    right = {a: np.mean([passed for b, passed in samples if b == a]) for a, _ in samples if a is not None}
    results = []
    for subset in combinations(samples, k):
        votes = Counter(a for a, _ in subset if a is not None)
        winners = [a for a, count in votes.items() if count == max(votes.values())]
        results.append(np.mean([right[a] for a in winners]) if winners else 0.0)
    return float(np.mean(results))


def majority(samples: Answers, k: int) -> float:
    votes = {
        a: (sum(b == a for b, _ in samples), sum(passed for b, passed in samples if b == a))
        for a, _ in samples
        if a is not None
    }
    return majority_at_k(votes, sum(a is None for a, _ in samples), k)


@given(answers, st.data())
@settings(max_examples=80, deadline=None)
def test_maj_at_k_is_the_mean_over_all_subsets(samples: Answers, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(samples)))
    assert majority(samples, k) == pytest.approx(majority_by_enumeration(samples, k), abs=1e-12)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=7), st.data())
@settings(max_examples=50, deadline=None)
def test_pass_at_k_and_best_of_k_are_the_means_over_all_subsets(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    subsets = list(combinations(values, k))
    assert best_of_k(values, k) == pytest.approx(np.mean([max(subset) for subset in subsets]), abs=1e-12)
    passed = [value > 0 for value in values]
    expected = np.mean([any(subset) for subset in combinations(passed, k)])
    assert pass_at_k(len(values), sum(passed), k) == pytest.approx(expected, abs=1e-12)
    assert best_of_k([float(one) for one in passed], k) == pytest.approx(expected, abs=1e-12)


def test_one_sample_and_all_samples() -> None:
    votes = {"3": (3, 3), "4": (3, 0), "5": (1, 0)}
    assert majority_at_k(votes, 1, 1) == pytest.approx(3 / 8)  # one sample: the share that passes
    assert majority_at_k(votes, 1, 8) == 0.5  # a tie of two
    assert majority_at_k({"4": (5, 0)}, 3, 4) == 0.0
    assert majority_at_k({}, 4, 2) == 0.0
    assert pass_at_k(8, 3, 1) == pytest.approx(3 / 8)
    assert pass_at_k(8, 0, 8) == 0.0
    assert best_of_k([0.5, 2.0, -1.0], 3) == 2.0


def test_many_samples_neither_overflow_nor_cancel() -> None:
    """C(10000, 5000) has 3,008 digits."""
    exact = 1 - comb(9_990, 5_000) / comb(10_000, 5_000)
    assert pass_at_k(10_000, 10, 5_000) == pytest.approx(exact, rel=1e-12)
    assert pass_at_k(10_000, 1, 1) == pytest.approx(1e-4, rel=1e-9)
    assert best_of_k(np.arange(10_000.0), 5_000) == pytest.approx(5_000 * 10_001 / 5_001 - 1, rel=1e-12)
    # Two answers, one vote more than half: the majority of an odd number of votes is hypergeometric.
    tail = sum(comb(60, i) * comb(40, 11 - i) for i in range(6, 12)) / comb(100, 11)
    assert majority_at_k({"right": (60, 60), "wrong": (40, 0)}, 0, 11) == pytest.approx(tail, rel=1e-10)


def test_more_samples_pass_more_often() -> None:
    chances = [pass_at_k(16, 3, k) for k in range(1, 17)]
    assert chances == sorted(chances)
    assert chances[-1] == 1.0


def test_intervals_are_those_of_the_resampled_prompts() -> None:
    """A mean's bootstrap distribution has the standard deviation of the plug-in standard error (Efron 1979)."""
    values = np.random.default_rng(1).random((400, 1))
    [interval] = bootstrap_intervals(values, np.ones_like(values), resamples=4000, confidence=0.95, seed=5)
    assert interval is not None
    error = values.std() / np.sqrt(len(values))
    assert interval == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.15 * error)


def test_intervals_agree_between_reruns_and_need_two_prompts() -> None:
    sums = np.random.default_rng(0).random((5, 3))
    weights = np.ones_like(sums)
    sums[1:, 2] = weights[1:, 2] = 0.0
    first = bootstrap_intervals(sums, weights, resamples=50, confidence=0.9, seed=7)
    assert first == bootstrap_intervals(sums, weights, resamples=50, confidence=0.9, seed=7)
    assert first != bootstrap_intervals(sums, weights, resamples=50, confidence=0.9, seed=8)
    assert first[2] is None
    assert bootstrap_intervals(sums[:1], weights[:1], resamples=50, confidence=0.9, seed=7) == [None] * 3


def test_chunks_of_resamples_are_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = np.random.default_rng(0).random((6, 1))
    whole = bootstrap_intervals(sums, np.ones_like(sums), resamples=31, confidence=0.9, seed=7)
    monkeypatch.setattr("chatlearn_core.executor.repeated_sampling._CHUNK", 50)
    assert whole == bootstrap_intervals(sums, np.ones_like(sums), resamples=31, confidence=0.9, seed=7)
