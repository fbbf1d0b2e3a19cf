"""What a step's metrics say that a person should hear at once: runs that cannot learn, or learn the wrong thing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from chatlearn_core.exceptions import BackendError
from chatlearn_core.executor.environment import Experience

EQUAL_REWARDS_STEPS = 3
"""Steps in a row without any spread of rewards before it is said: one may be chance."""
MISMATCH_PROB_DIFF = 0.05
"""Mean |p_trainer − p_generator| above which the two clearly disagree; float32 gives 1e-5, bfloat16 about 1e-2."""


class Alarms:
    """Keeps count over steps; returns sentences for the log."""

    def __init__(self) -> None:
        self._equal_rewards = 0
        self._equal_value: float | None = None

    def check(self, experience: Experience, metrics: Mapping[str, float]) -> list[str]:
        """Sentences about this step, empty if all is well.

        Raises:
            BackendError: every sample failed, so that going on would train nothing, step after step.
        """
        require_some_sample(experience)
        sentences: list[str] = []
        failed = int(metrics.get("samples/excluded", 0))
        if failed:
            reasons = Counter(s.exclusion for s in experience.samples if s.exclusion).most_common(3)
            listed = "; ".join(f"{count} x {reason}" for reason, count in reasons)
            sentences.append(f"{failed} of {len(experience.samples)} samples excluded: {listed}")
        values = {s.reward.value for s in experience.samples if s.reward and s.reward.value is not None}
        value = values.pop() if len(values) == 1 else None
        self._equal_rewards = 0 if value is None else self._equal_rewards + 1 if value == self._equal_value else 1
        self._equal_value = value
        if self._equal_rewards >= EQUAL_REWARDS_STEPS:
            sentences.append(
                f"every reward of the last {self._equal_rewards} steps is {value}: nothing can be learned. Look "
                "at rollouts/ for what the policy writes and whether the reward recognises a right answer"
            )
        difference = metrics.get("mismatch/prob_diff_mean", 0.0)
        if difference > MISMATCH_PROB_DIFF:
            sentences.append(
                f"generator and trainer disagree: mean probability difference {difference:.3f}. Likely causes: stale "
                "weights in the generator, different dtypes, another attention implementation, or logprobs of another "
                "temperature"
            )
        return sentences


def require_some_sample(experience: Experience) -> None:
    """Raises BackendError if every sample of the step failed in generation or reward."""
    samples = experience.samples
    if samples and all(s.exclusion and " failed: " in s.exclusion for s in samples):
        reason, count = Counter(s.exclusion for s in samples).most_common(1)[0]
        raise BackendError(
            f"all {len(samples)} samples of step {experience.step} failed; most frequent reason ({count} x): {reason}"
        )
