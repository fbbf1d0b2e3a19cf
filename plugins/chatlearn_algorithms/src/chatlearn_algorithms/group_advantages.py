"""Advantages relative to the other completions of the same prompt."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatlearn_algorithms.policy_gradient_options import AdvantageStd
from chatlearn_algorithms.scored_rewards import ScoredRewards
from chatlearn_core.types import Derived, Metric, Metrics, TrainBatch

Floats = npt.NDArray[np.float64]
GROUP_TOO_SMALL = "group_too_small"
ZERO_SPREAD = "zero_spread_group"
MIN_GROUP = 2
"""Exclusion of a single completion, which has no other to be compared with."""


def group_advantages(rewards: Floats, std: AdvantageStd = "population", epsilon: float = 1e-5) -> Floats:
    """(r − mean) / (std + ε) of one group (GRPO, arXiv 2402.03300, section 4.1.2).

    Args:
        rewards: [G], G at least 2.
        std: ``population`` divides the squared differences by G, ``sample`` by G − 1; ``none`` leaves r − mean
            (Dr.GRPO, arXiv 2503.20783).
        epsilon: added to the standard deviation.

    Returns:
        [G]; exactly 0 if all rewards are equal, even where the mean is rounded.
    """
    if np.ptp(rewards) == 0.0:
        return np.zeros_like(rewards)
    centred: Floats = rewards - rewards.mean()
    if std == "none":
        return centred
    return centred / (float(rewards.std(ddof=0 if std == "population" else 1)) + epsilon)


def derive_group_advantages(
    batch: TrainBatch, scored: ScoredRewards, advantages_of: Callable[[Floats], Floats], *, drop_zero_spread: bool
) -> Derived:
    """Compute the advantages of a batch of whole groups, and exclude groups without a signal.

    Args:
        batch: sequences of equal ``group_index`` are one group.
        scored: rewards of the batch. Advantages compare outcomes; the spread of a group is that of its verdicts, which
            contain neither a KL nor a length penalty.
        advantages_of: [G] outcomes of a group, not all equal -> [G] advantages.
        drop_zero_spread: exclude groups with equal verdicts.

    Returns:
        ``token_data["advantages"]`` ([T] float32, a sequence's advantage on its loss mask and 0 elsewhere) and
        ``sequence_data["advantage"]`` [S]. Excludes groups with fewer than 2 scored samples (``group_too_small``) and,
        if ``drop_zero_spread``, groups with equal rewards (``zero_spread_group``). Metrics: those of ``scored``,
        ``reward_std`` (mean over groups of the population standard deviation) and ``zero_spread_groups`` (fraction of
        groups).
    """
    outcomes = scored.outcomes.numpy()
    advantages = np.zeros(batch.num_sequences)
    for members in groups_of(batch):
        if len(members) >= MIN_GROUP and np.ptp(outcomes[members]) > 0.0:
            advantages[members] = advantages_of(outcomes[members])
    exclusions = groups_too_small(batch)
    metrics = scored.metrics | spread_metrics(batch, scored)
    if drop_zero_spread:
        exclusions = without_spread(batch, scored.verdicts)
    of_sequence = torch.from_numpy(advantages)
    return Derived({"advantages": on_actions(batch, of_sequence)}, {"advantage": of_sequence}, exclusions, metrics)


def on_actions(batch: TrainBatch, of_sequence: Tensor) -> Tensor:
    """[T] float32: the number of a sequence, from [S], at each token of its loss mask; 0 elsewhere."""
    return torch.where(batch.loss_mask, of_sequence[batch.sequence_index], 0.0).float()


def groups_of(batch: TrainBatch) -> list[list[int]]:
    """Return the sequences of each group; groups are in the order of their first sequence."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(batch.group_index.tolist()):
        members.setdefault(group, []).append(index)
    return list(members.values())


def group_means(batch: TrainBatch, of_sequence: Tensor) -> Tensor:
    """[S] the mean of each sequence's group."""
    means = torch.zeros_like(of_sequence)
    for members in groups_of(batch):
        means[members] = of_sequence[members].mean()
    return means


def groups_too_small(batch: TrainBatch) -> dict[str, str]:
    """Sample id -> ``group_too_small``, for samples of groups that are too small to compare."""
    return {batch.sample_ids[of[0]]: GROUP_TOO_SMALL for of in groups_of(batch) if len(of) < MIN_GROUP}


def without_spread(batch: TrainBatch, *rewards: Tensor) -> dict[str, str]:
    """Sample id -> reason, for groups that are too small or have equal rewards.

    Args:
        rewards: arrays [S]; a group has spread if the values of any array differ within it.
    """
    exclusions = groups_too_small(batch)
    for members in groups_of(batch):
        if len(members) >= MIN_GROUP and not any(np.ptp(values[members].numpy()) > 0.0 for values in rewards):
            exclusions |= dict.fromkeys((batch.sample_ids[index] for index in members), ZERO_SPREAD)
    return exclusions


def trained_tokens(batch: TrainBatch, exclusions: Collection[str]) -> Tensor:
    """[T] bool: the loss mask of the sequences that are not excluded."""
    kept = torch.tensor([sample not in exclusions for sample in batch.sample_ids], dtype=torch.bool)
    return batch.loss_mask & kept[batch.sequence_index]


def spread_metrics(batch: TrainBatch, scored: ScoredRewards) -> Metrics:
    """``reward_std`` and ``zero_spread_groups``."""
    verdicts = scored.verdicts.numpy()
    groups = [verdicts[members] for members in groups_of(batch)]
    if not groups:
        return {}
    return {
        "reward_std": Metric(float(sum(group.std() for group in groups)), len(groups)),
        "zero_spread_groups": Metric(float(sum(np.ptp(group) == 0.0 for group in groups)), len(groups)),
    }
