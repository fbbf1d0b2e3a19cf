"""Alarms about a step's metrics that a user should see at once: a run that cannot learn, or learns the wrong thing."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

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
STALE_KL = 0.03
"""KL of tokens of older weights, nats, above which corrections no longer help: of the runs in
``benchmarks/results/async_learning.json``, those below 0.02 learn, and those above it lose accuracy."""
TREND_STEPS = JUMP_STEPS[1]
"""Steps through which a line is fitted."""
TREND_RISE, TREND_CORRELATION, TREND_FLOOR = 1.25, 0.7, 1e-4
"""KL grows if the line rises by this multiple of its mean, fits this well, and ends above this value in nats. What
rises for eight steps and stays, as staleness at the start of a run, rises by its mean alone."""
MISMATCH_CAUSES = (
    "Likely causes: stale weights in the generator (a weight sync that did not reach all of it), different dtypes, "
    "another attention implementation, or logprobs of another temperature"
)
STALE_REMEDY = (
    "Staleness grows, not the difference of the engines. Lower rollout.max_staleness or the learning rate, or bound "
    "importance weights more strictly (algorithm.options.importance_threshold)"
)
JUMP_CAUSES = (
    "What changes from one step to the next: a weight sync that failed in part or left tied weights or a prefix cache "
    "old, a replica that was rebuilt, an update that threw the policy far (policy/grad_norm, policy/ppo_kl), or longer "
    "completions than before"
)


class Alarms:
    """Keeps counts over steps, which checkpoints hold; returns sentences for the log."""

    def __init__(self) -> None:
        self._equal_rewards = 0
        self._equal_value: float | None = None
        self._equal_groups = 0
        self._earlier: dict[str, deque[float]] = defaultdict(partial(deque, maxlen=TREND_STEPS))
        """Metric -> its values in earlier steps."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "equal_rewards": self._equal_rewards,
            "equal_value": self._equal_value,
            "equal_groups": self._equal_groups,
            "earlier": {name: list(values) for name, values in self._earlier.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self._equal_rewards, self._equal_value = state["equal_rewards"], state["equal_value"]
        self._equal_groups = state["equal_groups"]
        self._earlier.clear()
        for name, values in state["earlier"].items():
            self._earlier[name].extend(values)

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
        return self._of_current(metrics) + self._of_stale(metrics) + self._growing(metrics)

    def _growing(self, metrics: Mapping[str, float]) -> list[str]:
        """Differences that grow too slowly for a jump."""
        told: list[str] = []
        if (line := self._line("mismatch/kl", metrics)) is not None:
            told.append(
                f"the difference between generator and trainer grows: KL of tokens of the current weights from "
                f"{line[0]:.2g} to {line[1]:.2g} nats in {TREND_STEPS} steps. The engines' numerics differ more as the "
                "weights change, staleness has no part in it: compare dtypes and attention, and raise their precision"
            )
        if (line := self._line("mismatch/stale_kl", metrics)) is not None:
            told.append(
                f"tokens of older weights move away from the policy: KL from {line[0]:.2g} to {line[1]:.2g} nats in "
                f"{TREND_STEPS} steps. {STALE_REMEDY}"
            )
        return told

    def _line(self, name: str, metrics: Mapping[str, float]) -> tuple[float, float] | None:
        """Both ends of the line through the last values of a metric if it grows; they are then forgotten, so that the
        next warning needs as many new steps.
        """
        if name not in metrics:
            return None
        values = self._earlier[name]
        values.append(metrics[name])
        if len(values) < TREND_STEPS:
            return None
        steps = np.arange(TREND_STEPS)
        last = list(values)[-TREND_STEPS:]
        slope, start = np.polyfit(steps, last, 1)
        end, rise = start + slope * (TREND_STEPS - 1), slope * (TREND_STEPS - 1)
        if end < TREND_FLOOR or rise < TREND_RISE * np.mean(last) or np.corrcoef(steps, last)[0, 1] < TREND_CORRELATION:
            return None
        values.clear()
        return max(0.0, float(start)), float(end)

    def _of_stale(self, metrics: Mapping[str, float]) -> list[str]:
        """Tokens of older weights: the difference grows with staleness and with the updates' sizes."""
        difference, kl = metrics.get("mismatch/stale_prob_diff_mean"), metrics.get("mismatch/stale_kl", 0.0)
        before = None if difference is None else _jump(self._earlier["mismatch/stale_prob_diff_mean"], difference)
        if before is None:
            if kl <= STALE_KL:
                return []
            return [
                f"tokens of older weights are far from the policy: KL {kl:.2g} nats, above {STALE_KL:g}, where "
                f"training has been seen to lose accuracy. {STALE_REMEDY}"
            ]
        current = metrics.get("mismatch/prob_diff_mean")
        known = "" if current is None else f" (tokens of the current weights: {current:.2g})"
        return [
            f"tokens of older weights are further from the policy than before: mean probability difference "
            f"{difference:.2g}{known}, median of earlier steps {before:.2g}. {STALE_REMEDY}"
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
        earlier = self._earlier["mismatch/prob_diff_mean"]
        if (before := _jump(earlier, difference)) is not None:
            return [
                f"the difference between generator and trainer jumped: mean probability difference {difference:.2g}, "
                f"median of the {len(earlier) - 1} steps before {before:.2g}. {JUMP_CAUSES}"
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
