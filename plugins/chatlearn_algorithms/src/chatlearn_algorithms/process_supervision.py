"""Advantages from rewards of steps: GRPO with process supervision (arXiv 2402.03300, section 4.1.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from chatlearn_algorithms.group_advantages import (
    MIN_GROUP,
    Floats,
    groups_of,
    groups_too_small,
    on_actions,
    spread_metrics,
    without_spread,
)
from chatlearn_algorithms.group_relative import GroupRelative
from chatlearn_algorithms.grpo_options import GRPOOptions
from chatlearn_algorithms.scored_rewards import ScoredRewards
from chatlearn_core.types import Derived, Metric, RewardResult, TrainBatch
from chatlearn_core.types.scored_batch import STEP_ENDS, TOKEN_REWARDS


class StepSupervised(GroupRelative[GRPOOptions]):
    """Advantages of whole completions, or with ``supervision=process`` of their steps, too."""

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        """A completion has one advantage, or each of its tokens the sum of those of its step and of later ones."""
        if self.options.supervision == "outcome":
            return super().advantages(batch, step)
        return derive_process_advantages(
            batch,
            self.scored(batch, step),
            self.scored(without_token_rewards(batch), step),
            self.group_advantages,
            drop_zero_spread=self.options.drop_zero_spread_groups,
        )

    def has_spread(self, rewards: Sequence[RewardResult]) -> bool:
        """Verdicts differ, or with ``supervision=process`` those of completions without their steps, or of steps."""
        return super().has_spread(rewards) if self.options.supervision == "outcome" else differ(rewards)


def without_token_rewards(batch: TrainBatch) -> TrainBatch:
    """The batch with the rewards of whole completions alone."""
    return replace(batch, token_data={name: of for name, of in batch.token_data.items() if name != TOKEN_REWARDS})


def differ(rewards: Sequence[RewardResult]) -> bool:
    """Whether a group has spread: of several completions, their own rewards differ, or those of all their steps."""
    steps: set[float] = set()
    for reward in rewards:
        if reward.token_values is not None and reward.step_ends is not None:
            steps |= {float(value) for value in reward.token_values[reward.step_ends]}
    return len(rewards) >= MIN_GROUP and (len({reward.value for reward in rewards}) > 1 or len(steps) > 1)


def derive_process_advantages(
    batch: TrainBatch,
    scored: ScoredRewards,
    outcomes: ScoredRewards,
    advantages_of: Callable[[Floats], Floats],
    *,
    drop_zero_spread: bool,
) -> Derived:
    """A_t = A(outcome) + sum of r~_j over the steps j that end at or after token t.

    r~_j = (r_j - mean(R)) / (std(R) + epsilon), with R the rewards of all steps of the group. The paper has no
    outcome besides the steps: where all are equal, A(outcome) is 0 and the formula is the paper's. Rewards of tokens
    that end no step are not used.

    Args:
        batch: sequences of equal ``group_index`` are one group; ``token_data["token_rewards"]`` and ``["step_ends"]``
            hold the steps.
        scored: its rewards, those of tokens included, for the metrics.
        outcomes: its rewards without those of tokens.
        advantages_of: [N] rewards of a group, not all equal -> [N] normalised.
        drop_zero_spread: exclude groups in which neither outcomes nor rewards of steps differ.

    Returns:
        ``token_data["advantages"]``, [T] float32, 0 outside the loss mask. Exclusions and metrics are those of
        ``derive_group_advantages``; ``reward_steps`` is the mean number of steps of a completion.
    """
    of_sequence = np.zeros(batch.num_sequences)
    of_outcomes = outcomes.outcomes.numpy()
    for members in groups_of(batch):
        if len(members) >= MIN_GROUP and np.ptp(of_outcomes[members]) > 0.0:
            of_sequence[members] = advantages_of(of_outcomes[members])
    steps = _Steps(batch)
    advantages = on_actions(batch, torch.from_numpy(of_sequence)).double() + steps.advantages(advantages_of)
    exclusions = groups_too_small(batch)
    metrics = scored.metrics | spread_metrics(batch, scored)
    if batch.num_sequences:
        spread, groups = steps.spread(), groups_of(batch)
        flat = [not any(np.ptp(of[one].numpy()) > 0.0 for of in (outcomes.verdicts, spread)) for one in groups]
        metrics["zero_spread_groups"] = Metric(float(sum(flat)), len(groups))
        metrics["reward_steps"] = Metric(float(steps.ends.sum()), batch.num_sequences)
    if drop_zero_spread:
        exclusions = without_spread(batch, outcomes.verdicts, steps.spread())
    return Derived({"advantages": torch.where(batch.loss_mask, advantages, 0.0).float()}, {}, exclusions, metrics)


class _Steps:
    """The steps of a batch."""

    def __init__(self, batch: TrainBatch) -> None:
        self._batch = batch
        self._bounds = list(pairwise(batch.cu_seqlens.tolist()))
        none = torch.zeros(batch.num_tokens)
        self.ends = batch.token_data.get(STEP_ENDS, none.bool())
        """[T] bool: the last token of a step."""
        self._values = batch.token_data.get(TOKEN_REWARDS, none).double().numpy()

    def _of_group(self, members: list[int]) -> Tensor:
        """Positions in [0, T) of the group's ends of steps."""
        found = [self.ends[slice(*self._bounds[one])].nonzero().squeeze(-1) + self._bounds[one][0] for one in members]
        return torch.cat(found)

    def advantages(self, advantages_of: Callable[[Floats], Floats]) -> Tensor:
        """[T] float64 sums of the normalised rewards of steps that end at or after each token."""
        normalised = np.zeros(self._batch.num_tokens)
        for members in groups_of(self._batch):
            ends = self._of_group(members).numpy()
            if len(ends) and np.ptp(self._values[ends]) > 0.0:
                normalised[ends] = advantages_of(self._values[ends])
        sums = np.zeros_like(normalised)
        for start, stop in self._bounds:
            sums[start:stop] = np.cumsum(normalised[start:stop][::-1])[::-1]
        return torch.from_numpy(sums)

    def spread(self) -> Tensor:
        """[S] numbers that differ within a group if and only if its rewards of steps do."""
        marks = torch.zeros(self._batch.num_sequences, dtype=torch.float64)
        for members in groups_of(self._batch):
            ends = self._of_group(members).numpy()
            if len(ends) and np.ptp(self._values[ends]) > 0.0:
                marks[members[0]] = 1.0
        return marks
