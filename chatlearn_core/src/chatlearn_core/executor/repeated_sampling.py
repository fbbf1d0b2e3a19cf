"""Estimators over several samples of one prompt, and bootstrap intervals over prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import exp, lgamma, log, log1p

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_CHUNK = 1 << 20
"""Number of drawn indices held at a time by ``bootstrap_intervals``."""


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that at least one of ``k`` samples, drawn without replacement, passes: 1 - C(n - c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models Trained on Code" (eq. 1), as a product
    that neither overflows nor cancels.

    Args:
        num_samples: n, samples of the prompt, at least ``k``.
        num_passed: c of them pass.
    """
    assert 1 <= k <= num_samples, "k samples are drawn from n"
    if num_samples - num_passed < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(num_samples - num_passed + 1, num_samples + 1)))


def best_of_k(values: Sequence[float], k: int) -> float:
    """Expected maximum of ``k`` of the values, drawn without replacement.

    The i-th smallest of n values (from 1) is the maximum of C(i - 1, k - 1) of the C(n, k) subsets.

    Args:
        values: [n] finite, n at least ``k``.
    """
    ordered = np.sort(np.asarray(values, np.float64))
    assert 1 <= k <= len(ordered), "k values are drawn from n"
    ranks = np.arange(len(ordered), k, -1)  # n, n - 1, ..., k + 1
    weights = k / len(ordered) * np.cumprod(np.concatenate([[1.0], (ranks - k) / (ranks - 1)]))
    return float(weights @ ordered[::-1][: len(weights)])


def majority_at_k(votes: Mapping[str, tuple[int, int]], num_silent: int, k: int) -> float:
    """Probability that the most frequent answer of ``k`` samples, drawn without replacement, is right.

    Self-consistency (Wang et al. 2022), exact instead of sampled. Among equally frequent answers each is chosen with
    the same probability. Samples without an answer do not vote; where none of the k votes, the result is wrong.

    Args:
        votes: answer -> (number of samples with it, number of those that pass). If not all of them pass, the answer
            counts as right in proportion.
        num_silent: samples without an answer.
    """
    return _majority_at_k(tuple(sorted(votes.values())), num_silent, k)


@lru_cache(maxsize=4096)
def _majority_at_k(votes: tuple[tuple[int, int], ...], num_silent: int, k: int) -> float:
    """``majority_at_k`` of the sorted counts.

    The numbers of votes for each answer follow a multivariate hypergeometric distribution: that of independent
    Binomial(count, p) numbers, given that their sum is k. With p = k / n no term under- or overflows.
    """
    total = num_silent + sum(count for count, _ in votes)
    assert 1 <= k <= total, "k samples are drawn from n"
    if k == total:
        most = max((count for count, _ in votes), default=0)
        shares = [passed / count for count, passed in votes if count == most]
        return sum(shares) / len(shares) if shares else 0.0
    laws = [_binomial(count, k / total) for count, _ in votes]
    silent = _binomial(num_silent, k / total)
    result = 0.0
    for winner, (count, passed) in enumerate(votes):
        if passed == 0:
            continue
        others = [law for index, law in enumerate(laws) if index != winner]
        chance = sum(
            laws[winner][most] * _no_more_than(others, silent, most, k - most) for most in range(1, min(count, k) + 1)
        )
        result += passed / count * float(chance)
    return result / float(_binomial(total, k / total)[k])


def _no_more_than(others: Sequence[Floats], silent: Floats, most: int, room: int) -> float:
    """Probability that others take ``room`` votes, none more than ``most``, and that a tie is decided against them."""
    table = np.zeros((room + 1, room // most + 1))  # [votes so far, answers tied with the winner]
    table[0, 0] = 1.0
    for law in others:
        after = np.zeros_like(table)
        for taken in range(min(most, len(law), room + 1)):
            after[taken:] += law[taken] * table[: room + 1 - taken]
        if most < len(law) and most <= room:
            after[most:, 1:] += law[most] * table[: room + 1 - most, :-1]
        table = after
    decided = table @ (1.0 / np.arange(1, table.shape[1] + 1))
    taken = min(len(silent), room + 1)
    return float(silent[:taken] @ decided[::-1][:taken])


def _binomial(count: int, p: float) -> Floats:
    """[count + 1] probabilities of Binomial(count, p), 0 < p < 1."""
    logs = [
        lgamma(count + 1) - lgamma(i + 1) - lgamma(count - i + 1) + i * log(p) + (count - i) * log1p(-p)
        for i in range(count + 1)
    ]
    return np.array([exp(value) for value in logs])


def bootstrap_intervals(
    sums: Floats, weights: Floats, *, resamples: int, confidence: float, seed: int
) -> list[tuple[float, float] | None]:
    """Percentile bootstrap intervals of ratios (Efron 1979), with prompts as the resampled units.

    All metrics see the same resamples, and the same seed gives the same ones, so that two evaluations on the same
    prompts are compared on equal terms.

    Args:
        sums: [P, M] numerators of M metrics by prompt.
        weights: [P, M] denominators; 0 where a prompt has no part in a metric.
        confidence: such as 0.95, of two-sided intervals.

    Returns:
        (low, high) for each metric; None if fewer than two prompts have a part in it.
    """
    prompts, metrics = sums.shape
    if prompts < 2 or resamples < 1:
        return [None] * metrics
    random = np.random.default_rng(seed)
    rows, ratios = max(1, _CHUNK // prompts), []
    for start in range(0, resamples, rows):
        drawn = random.integers(prompts, size=(min(rows, resamples - start), prompts))
        times = np.stack([np.bincount(row, minlength=prompts) for row in drawn]).astype(np.float64)
        with np.errstate(invalid="ignore"):
            ratios.append(times @ sums / (times @ weights))
    edges = (0.5 - confidence / 2, 0.5 + confidence / 2)
    known = (weights > 0).sum(0) > 1
    return [
        tuple(np.nanquantile(column, edges).tolist()) if enough else None
        for column, enough in zip(np.concatenate(ratios).T, known, strict=True)
    ]
