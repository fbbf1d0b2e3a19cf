"""Metrics of evaluated samples: means, pass@k, maj@k, best@k, and their intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from chatlearn_core.executor.repeated_sampling import best_of_k, bootstrap_intervals, majority_at_k, pass_at_k
from chatlearn_core.types import UNGRADED, Metric, Metrics, RewardResult, Sample
from chatlearn_core.types.keyed_seed import keyed_seed

ACCURACY = ("accuracy", "acc")
"""Reward components that say whether a sample is right; the first one present counts."""
RIGHT = 1.0
"""Accuracy from which a sample passes by default: partly right is not right."""


@dataclass(slots=True, frozen=True)
class Measures:
    """What is measured besides means.

    Example: 4 samples a prompt give pass@1, pass@2, pass@4 by default.
    """

    k: tuple[int, ...] = ()
    """The k of pass@k, maj@k and best@k."""
    pass_threshold: float | None = None
    """Accuracy, or reward where the rewards give no accuracy, from which a sample passes. None: accuracy 1; without an
    accuracy nothing says what passes."""
    confidence: float = 0.95
    resamples: int = 0
    """Bootstrap resamples of the intervals; 0: no intervals."""
    seed: int = 0
    """The run's seed, which keys the resamples."""


def usual_k(samples_per_prompt: int) -> tuple[int, ...]:
    """The powers of two up to the number of samples, and that number; none for a single sample.

    Example: ``usual_k(10) == (1, 2, 4, 8, 10)``
    """
    if samples_per_prompt == 1:
        return ()
    powers = takewhile(lambda k: k < samples_per_prompt, (1 << i for i in range(samples_per_prompt)))
    return (*powers, samples_per_prompt)


@dataclass(slots=True, frozen=True)
class _Graded:
    """One prompt's samples."""

    samples: Sequence[Sample]
    accuracies: Sequence[float]
    """One per sample, 0 for those that could not be generated or scored; empty where the rewards give none."""
    passed: Sequence[bool]
    """One per sample; empty where nothing says what passes."""

    @property
    def rewards(self) -> list[float]:
        """Of the samples that have one."""
        return [s.reward.value for s in self.samples if s.reward is not None and s.reward.value is not None]

    def pass_at(self, k: int) -> float | None:
        return pass_at_k(len(self.passed), sum(self.passed), k) if len(self.passed) >= k else None

    def majority_at(self, k: int) -> float | None:
        if len(self.passed) < k:
            return None
        answers = [sample.reward.answer if sample.reward is not None else None for sample in self.samples]
        counts = Counter(answer for answer in answers if answer is not None)
        right = Counter(answer for answer, passed in zip(answers, self.passed, strict=True) if passed)
        return majority_at_k({a: (count, right[a]) for a, count in counts.items()}, answers.count(None), k)

    def best_at(self, k: int) -> float | None:
        return best_of_k(self.rewards, k) if len(self.rewards) >= k else None


def evaluation_metrics(prefix: str, samples: Sequence[Sample], measures: Measures | None = None) -> Metrics:
    """Means over samples and, by ``measures``, means over prompts of estimates from several samples.

    A sample that could not be generated or scored is counted, counts as wrong, and has no part in the rewards. A reward
    above 0 does not mean a right answer, so ``accuracy`` exists only if every reward provides it. maj@k exists if a
    reward gives the answers that it graded. Intervals have ``/low`` and ``/high`` behind the metric's name.
    """
    measures = measures or Measures()
    failed = sum(sample.exclusion is not None for sample in samples)
    metrics: Metrics = {
        f"{prefix}/samples": Metric(len(samples), reducer="sum"),
        f"{prefix}/failed": Metric(failed, reducer="sum"),
    }
    if ungraded := sum(s.reward is not None and UNGRADED in s.reward.components for s in samples):
        metrics[f"{prefix}/ungraded"] = Metric(ungraded, reducer="sum")
    lengths = [sample.num_completion_tokens for sample in samples if sample.turns]
    if lengths:
        metrics[f"{prefix}/response_length"] = Metric(sum(lengths), len(lengths))
    prompts = _graded(samples, measures.pass_threshold)
    means: dict[str, list[tuple[float, int]]] = {}
    """Metric -> one (sum, number of summands) a prompt."""
    if any(prompt.accuracies for prompt in prompts):
        means["accuracy"] = [(sum(prompt.accuracies), len(prompt.accuracies)) for prompt in prompts]
        most = max(len(prompt.accuracies) for prompt in prompts)
        if most > 1:
            means[f"avg@{most}"] = means["accuracy"]
    means["reward"] = [(sum(prompt.rewards), len(prompt.rewards)) for prompt in prompts]
    estimates: list[tuple[str, Callable[[_Graded, int], float | None]]] = [("pass", _Graded.pass_at)]
    if any(sample.reward is not None and sample.reward.answer is not None for sample in samples):
        estimates.append(("maj", _Graded.majority_at))
    estimates.append(("best", _Graded.best_at))
    for name, estimate in estimates:
        for k in measures.k:
            of_prompts = [estimate(prompt, k) for prompt in prompts]
            means[f"{name}@{k}"] = [(0.0, 0) if value is None else (value, 1) for value in of_prompts]
    return metrics | with_intervals(prefix, means, measures)


def with_intervals(prefix: str, means: Mapping[str, Sequence[tuple[float, float]]], measures: Measures) -> Metrics:
    """The means that have a summand, with the intervals of those in which two prompts take part."""
    means = {name: parts for name, parts in means.items() if any(weight for _, weight in parts)}
    if not means:
        return {}
    table = np.array(list(means.values()), np.float64)  # [M, P, 2]
    sums, weights = table[..., 0].T, table[..., 1].T
    intervals = bootstrap_intervals(
        sums,
        weights,
        resamples=measures.resamples,
        confidence=measures.confidence,
        seed=keyed_seed(measures.seed, "evaluation intervals", prefix),
    )
    metrics: Metrics = {}
    for name, parts, interval in zip(means, means.values(), intervals, strict=True):
        metrics[f"{prefix}/{name}"] = Metric(sum(total for total, _ in parts), sum(weight for _, weight in parts))
        if interval is not None:
            metrics[f"{prefix}/{name}/low"], metrics[f"{prefix}/{name}/high"] = map(Metric, interval)
    return metrics


def _graded(samples: Sequence[Sample], pass_threshold: float | None) -> list[_Graded]:
    """The samples by prompt, graded by accuracy, or by reward if a threshold is given and not all have an accuracy."""
    judged = [s.reward for s in samples if s.reward is not None and s.reward.value is not None]
    verdicts = [verdict for r in judged if (verdict := accuracy(r)) is not None or UNGRADED not in r.components]
    has_accuracy = bool(verdicts) and None not in verdicts
    by_prompt: dict[str, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.group_id, []).append(sample)
    found: list[_Graded] = []
    for of_prompt in by_prompt.values():
        accuracies: list[float] = []
        passed: list[bool] = []
        if has_accuracy:
            accuracies = [(accuracy(s.reward) or 0.0) if s.reward is not None else 0.0 for s in of_prompt]
            passed = [value >= (RIGHT if pass_threshold is None else pass_threshold) for value in accuracies]
        elif pass_threshold is not None:
            values = [None if s.reward is None else s.reward.value for s in of_prompt]
            passed = [value is not None and value >= pass_threshold for value in values]
        found.append(_Graded(of_prompt, accuracies, passed))
    return found


def accuracy(reward: RewardResult) -> float | None:
    """Accuracy of the sample, 0 to 1: the reward's component ``accuracy`` or ``acc``; None if it has none, or one
    outside [0, 1].
    """
    value = next((reward.components[name] for name in ACCURACY if name in reward.components), None)
    return value if value is not None and 0.0 <= value <= 1.0 else None
