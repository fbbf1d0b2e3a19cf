"""Advantages relative to the other completions of the same prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from chatlearn_algorithms.grpo_options import AdvantageStd
from chatlearn_core.exceptions import FlowError
from chatlearn_core.types import Derived, Metric, Metrics, TrainBatch

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


def derive_group_advantages(batch: TrainBatch, *, std: AdvantageStd, epsilon: float, drop_zero_spread: bool) -> Derived:
    """The advantages of a batch of whole groups, and what a group cannot teach.

    Args:
        batch: with ``sequence_data["reward"]`` [S] and, where single tokens have rewards,
            ``token_data["token_rewards"]`` [T], which add to their sequence's. Sequences of equal ``group_index`` are
            one group.

    Returns:
        ``token_data["advantages"]`` ([T] float32, a sequence's advantage on its loss mask and 0 elsewhere) and
        ``sequence_data["advantage"]`` [S]. Excluded are the rest of a group of which fewer than 2 were scored
        (``group_too_small``), and, if ``drop_zero_spread``, groups with equal rewards (``zero_spread_group``). Metrics:
        ``reward`` (mean), ``reward_std`` (mean over groups of the population standard deviation), ``reward_min``,
        ``reward_max`` and ``zero_spread_groups`` (share of groups).

    Raises:
        FlowError: the batch has no rewards.
    """
    rewards = _outcomes(batch)
    advantages = np.zeros(batch.num_sequences)
    exclusions: dict[str, str] = {}
    scored: list[npt.NDArray[np.float64]] = []
    members_of: dict[int, list[int]] = {}
    for index, group in enumerate(batch.group_index.tolist()):
        members_of.setdefault(group, []).append(index)
    for members in members_of.values():
        of_group = rewards[members]
        scored.append(of_group)
        if len(members) < MIN_GROUP:
            exclusions[batch.sample_ids[members[0]]] = GROUP_TOO_SMALL
        elif drop_zero_spread and not np.ptp(of_group) > 0.0:
            exclusions |= dict.fromkeys((batch.sample_ids[index] for index in members), ZERO_SPREAD)
        else:
            advantages[members] = group_advantages(of_group, std, epsilon)
    of_sequence = torch.from_numpy(advantages)
    of_token = torch.where(batch.loss_mask, of_sequence[batch.sequence_index], 0.0).float()
    return Derived({"advantages": of_token}, {"advantage": of_sequence}, exclusions, _reward_metrics(scored))


def _outcomes(batch: TrainBatch) -> npt.NDArray[np.float64]:
    """[S] undiscounted returns: the verdict plus the rewards of single tokens, where there are any."""
    if not batch.num_sequences:
        return np.zeros(0)
    rewards = batch.sequence_data.get("reward")
    if rewards is None:
        raise FlowError(
            f"samples {batch.sample_ids[0]} ... {batch.sample_ids[-1]} have no rewards. Group advantages need one for "
            "every sample that is not excluded: join m.reward.score(samples) in the flow"
        )
    values: npt.NDArray[np.float64] = rewards.double().numpy().copy()
    of_tokens = batch.token_data.get("token_rewards")
    if of_tokens is not None:
        bounds = batch.cu_seqlens.tolist()
        values += [float(of_tokens[start:stop].sum()) for start, stop in pairwise(bounds)]
    return values


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
