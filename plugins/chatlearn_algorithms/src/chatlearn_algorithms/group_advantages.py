"""Advantages relative to the other completions of the same prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from chatlearn_algorithms.grpo_options import AdvantageStd
from chatlearn_core.exceptions import FlowError
from chatlearn_core.types import Metric, Metrics, Sample

EMPTY_COMPLETION = "empty_completion"
GROUP_TOO_SMALL = "group_too_small"
ZERO_SPREAD = "zero_spread_group"
MIN_GROUP = 2
"""One completion has nothing to be compared with."""


def group_advantages(
    rewards: npt.NDArray[np.float64], std: AdvantageStd = "population", epsilon: float = 1e-5
) -> npt.NDArray[np.float64]:
    """(r − mean) / (std + ε) of one group (GRPO, arXiv 2402.03300, section 4.1.2).

    Args:
        rewards: [G], G at least 2.
        std: ``population`` divides the squared differences by G, ``sample`` by G − 1; ``none`` leaves r − mean
            (Dr.GRPO, arXiv 2503.20783).
        epsilon: added to the standard deviation.

    Returns:
        [G]; exactly 0 where all rewards are equal, rounding of the mean notwithstanding.
    """
    if np.ptp(rewards) == 0.0:
        return np.zeros_like(rewards)
    centred: npt.NDArray[np.float64] = rewards - rewards.mean()
    if std == "none":
        return centred
    return centred / (float(rewards.std(ddof=0 if std == "population" else 1)) + epsilon)


def assign_group_advantages(
    samples: Sequence[Sample], *, std: AdvantageStd, epsilon: float, drop_zero_spread: bool
) -> Metrics:
    """Write every admitted sample's advantage, in place, and exclude what a group cannot teach.

    Adds ``token_data["advantages"]`` ([T] float32, the sample's advantage on the loss mask and 0 elsewhere) and
    ``sequence_data["advantage"]``. Excludes completions without a token (``empty_completion``), the rest of a group of
    which fewer than 2 were scored (``group_too_small``), and, if ``drop_zero_spread``, groups with equal rewards
    (``zero_spread_group``). Samples that are excluded already are no part of their group's statistics.

    Returns:
        ``reward`` (mean), ``reward_std`` (mean over groups of the population standard deviation), ``reward_min``,
        ``reward_max`` and ``zero_spread_groups`` (share of groups), over the scored samples.

    Raises:
        FlowError: an admitted sample has no reward.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.exclusion is None and not sample.loss_mask.any():
            sample.exclusion = EMPTY_COMPLETION
        if sample.exclusion is None:
            groups.setdefault(sample.group_id, []).append(sample)

    scored: list[npt.NDArray[np.float64]] = []
    for members in groups.values():
        rewards = np.array([_outcome(sample) for sample in members])
        scored.append(rewards)
        spread = bool(np.ptp(rewards) > 0.0)
        if len(members) < MIN_GROUP:
            members[0].exclusion = GROUP_TOO_SMALL
            continue
        if drop_zero_spread and not spread:
            for sample in members:
                sample.exclusion = ZERO_SPREAD
            continue
        for sample, advantage in zip(members, group_advantages(rewards, std, epsilon), strict=True):
            sample.token_data["advantages"] = np.where(sample.loss_mask, advantage, 0.0).astype(np.float32)
            sample.sequence_data["advantage"] = float(advantage)
    return _reward_metrics(scored)


def _outcome(sample: Sample) -> float:
    """The undiscounted return: the verdict plus the rewards of single tokens, where there are any."""
    reward = sample.reward
    if reward is None or reward.value is None:
        cause = "none was joined" if reward is None else f"the reward failed: {reward.error}"
        raise FlowError(
            f"Sample {sample.id} has no reward ({cause}) and was not excluded. Group advantages need a reward for "
            f"every admitted sample: join m.reward.score(samples) in the flow."
        )
    return reward.value + (float(reward.token_values.sum()) if reward.token_values is not None else 0.0)


def _reward_metrics(groups: Sequence[npt.NDArray[np.float64]]) -> Metrics:
    if not groups:
        return {}
    rewards = np.concatenate(groups)
    return {
        "reward": Metric(float(rewards.sum()), len(rewards)),
        "reward_std": Metric(float(sum(group.std() for group in groups)), len(groups)),
        "reward_min": Metric(float(rewards.min()), reducer="min"),
        "reward_max": Metric(float(rewards.max()), reducer="max"),
        "zero_spread_groups": Metric(float(sum(np.ptp(group) == 0.0 for group in groups)), len(groups)),
    }
