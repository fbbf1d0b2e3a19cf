"""Alarms about a step's metrics that a user should see at once: a run that cannot learn, or learns the wrong thing."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import numpy as np

from chatlearn_core.exceptions import BackendError
from chatlearn_core.executor.step_samples import Experience
from chatlearn_core.types import UNGRADED, Sample

FAILURES = frozenset({"generation failed", "generation timed out", "reward failed"})
"""Exclusions that are failures rather than effects of a setting."""
EQUAL_REWARDS_STEPS = 3
"""Consecutive steps with equal rewards, of all samples or within every group, before the alarm: a single one may be
chance."""
EQUAL_GROUPS = "zero_spread_groups"
"""Metric of algorithms that compare the completions of a prompt: the fraction of groups whose rewards are all equal."""
MISMATCH_PROB_DIFF = 0.05
"""Mean |p_trainer − p_generator| above which the two clearly disagree; float32 gives 1e-5, bfloat16 about 1e-2."""
JUMP_FACTOR = 5.0
"""Ratio to the median of earlier steps above which the difference has jumped; in a sound run it stays below 2."""
JUMP_FLOOR = 1e-3
"""A difference below it is rounding, however small it was before."""
JUMP_STEPS = (5, 20)
"""Minimum and maximum number of earlier steps that a jump is compared with."""
MISMATCH_CAUSES = (
    "Likely causes: stale weights in the generator (a weight sync that did not reach all of it), different dtypes, "
    "another attention implementation, or logprobs of another temperature"
)
JUMP_CAUSES = (
    "What changes from one step to the next: a weight sync that failed in part or left tied weights or a prefix cache "
    "old, a replica that was rebuilt, an update that threw the policy far (policy/grad_norm, policy/ppo_kl), or longer "
    "completions than before"
)


class Alarms:
    """Keeps counts over steps; returns sentences for the log."""

    def __init__(self) -> None:
        self._equal_rewards = 0
        self._equal_value: float | None = None
        self._equal_groups = 0
        self._differences: deque[float] = deque(maxlen=JUMP_STEPS[1])
        self._stale_differences: deque[float] = deque(maxlen=JUMP_STEPS[1])

    def check(self, experience: Experience, metrics: Mapping[str, float]) -> list[str]:
        """Sentences about this step; empty if there is no alarm.

        Raises:
            BackendError: every sample failed, so that continuing would train nothing, step after step.
        """
        require_some_sample(experience)
        sentences: list[str] = []
        failed = len(experience.samples) - len(experience.admitted)
        if failed:
            listed = "; ".join(_reasons(experience.samples)[:3])
            sentences.append(f"{failed} of {len(experience.samples)} samples excluded: {listed}")
        slow = [sample.id for sample in experience.samples if sample.reward and UNGRADED in sample.reward.components]
        if slow:
            sentences.append(
                f"{len(slow)} of {len(experience.samples)} samples took too much time or memory to judge and count as "
                f"wrong (first: sample {slow[0]}). If the machine is only slow, raise the reward's options.timeout_s"
            )
        sentences += self._standstill(experience.samples, metrics)
        return sentences + self.mismatch(metrics)

    def _standstill(self, samples: Sequence[Sample], metrics: Mapping[str, float]) -> list[str]:
        """A sentence if rewards have not differed for some steps."""
        scored = [sample.reward for sample in samples if sample.reward and sample.reward.value is not None]
        values = {reward.value for reward in scored}
        of_tokens = any(reward.token_values is not None and np.any(reward.token_values) for reward in scored)
        value = values.pop() if len(values) == 1 and not of_tokens else None
        self._equal_rewards = 0 if value is None else self._equal_rewards + 1 if value == self._equal_value else 1
        self._equal_value = value
        self._equal_groups = self._equal_groups + 1 if metrics.get(EQUAL_GROUPS) == 1.0 else 0
        if self._equal_rewards >= EQUAL_REWARDS_STEPS:
            return [
                f"every reward of the last {self._equal_rewards} steps is {value}: nothing can be learned. Look "
                "at rollouts/ for what the policy writes and whether the reward recognises a right answer"
            ]
        if self._equal_groups >= EQUAL_REWARDS_STEPS:
            return [
                f"for {self._equal_groups} steps the rewards within each group have been equal, although groups "
                "differ: this algorithm compares the completions of a prompt, and has nothing to learn from them. "
                "Prompts are too easy or too hard, or completions too alike: choose prompts of which some completions "
                "are right (data.train), raise algorithm.options.group_size or sampling.temperature, or use a reward "
                "with more than two values. With a reward that looks only at the prompt, nothing helps"
            ]
        return []

    def mismatch(self, metrics: Mapping[str, float]) -> list[str]:
        """Sentences about the difference between generator and trainer, if these metrics contain it."""
        return self._of_current(metrics) + self._of_stale(metrics)

    def _of_stale(self, metrics: Mapping[str, float]) -> list[str]:
        """Tokens of older weights: the difference grows with staleness and with the updates' sizes."""
        difference = metrics.get("mismatch/stale_prob_diff_mean")
        before = None if difference is None else _jump(self._stale_differences, difference)
        if before is None:
            return []
        current = metrics.get("mismatch/prob_diff_mean")
        known = "" if current is None else f" (tokens of the current weights: {current:.2g})"
        return [
            f"tokens of older weights are further from the policy than before: mean probability difference "
            f"{difference:.2g}{known}, median of earlier steps {before:.2g}. Staleness grows, not the difference of "
            "the engines. Lower rollout.max_staleness or the learning rate, or bound importance weights more strictly "
            "(algorithm.options.importance_threshold)"
        ]

    def _of_current(self, metrics: Mapping[str, float]) -> list[str]:
        difference = metrics.get("mismatch/prob_diff_mean")
        if difference is None:
            return []
        infinite = metrics.get("mismatch/infinite", 0.0)
        if infinite > 0:
            return [
                f"{infinite:.1%} of the sampled tokens have no finite logprob with either the trainer or the "
                f"generator: the two do not hold the same model. {MISMATCH_CAUSES}"
            ]
        if (before := _jump(self._differences, difference)) is not None:
            return [
                f"the difference between generator and trainer jumped: mean probability difference {difference:.2g}, "
                f"median of the {len(self._differences) - 1} steps before {before:.2g}. {JUMP_CAUSES}"
            ]
        if difference > MISMATCH_PROB_DIFF:
            return [f"generator and trainer disagree: mean probability difference {difference:.3f}. {MISMATCH_CAUSES}"]
        return []


def _jump(earlier: deque[float], difference: float) -> float | None:
    """The median of earlier steps if the difference has jumped, else None. The difference joins the earlier ones."""
    before = statistics.median(earlier) if len(earlier) >= JUMP_STEPS[0] else None
    earlier.append(difference)
    return before if before is not None and difference > max(JUMP_FLOOR, JUMP_FACTOR * before) else None


def require_some_sample(experience: Experience) -> None:
    """Raises BackendError if every sample of the step failed in generation or reward."""
    samples = experience.samples
    if samples and all(s.exclusion and s.exclusion.partition(":")[0] in FAILURES for s in samples):
        raise BackendError(
            f"all {len(samples)} samples of step {experience.step} failed; most frequent reason: {_reasons(samples)[0]}"
        )


def _reasons(samples: Sequence[Sample]) -> list[str]:
    """The reasons for exclusion, most frequent first, each with its count and one sample."""
    first: dict[str, str] = {}
    for sample in samples:
        if sample.exclusion:
            first.setdefault(sample.exclusion, sample.id)
    counts = Counter(sample.exclusion for sample in samples if sample.exclusion).most_common()
    return [f"{count} x {reason} (first: sample {first[reason]})" for reason, count in counts]
