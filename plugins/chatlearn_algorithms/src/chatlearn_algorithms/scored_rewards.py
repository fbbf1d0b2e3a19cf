"""The rewards of a step's samples: as scored, with shaping added and a KL subtracted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from chatlearn_core.exceptions import FlowError
from chatlearn_core.types import Metric, Metrics, TrainBatch
from chatlearn_losses import kl_estimate, masked_difference, rewards_at_actions, topk_kl
from chatlearn_losses.kl import MAX_LOG_DIFFERENCE


@dataclass(slots=True, frozen=True, eq=False)
class ScoredRewards:
    """Rewards of S sequences, [S] and [T] float64."""

    verdicts: Tensor
    """[S] the rewards of the reward roles: the verdict plus the rewards of single tokens."""
    shaped: Tensor
    """[S] verdicts with shaping."""
    outcomes: Tensor
    """[S] verdicts with shaping, minus the KL in the reward."""
    tokens: Tensor
    """[T] rewards at the tokens that the policy sampled; the verdict is at the last one."""
    metrics: Metrics


@dataclass(slots=True, frozen=True)
class KLPenalty:
    """−β KL_t of each sampled token, from the logprobs at the beginning of the step (arXiv 2203.02155, eq. 2)."""

    coef: float
    estimator: Literal["k1", "k2", "k3", "full"]
    """``full``: over the reference's most likely tokens and one class for all others."""
    clamps: bool
    """Whether log-ratios are clipped to ±20, so that a token of probability 0 does not make other advantages infinite.
    """
    policy_logprobs: str
    """``token_data``, [T] of the sampled tokens; for ``full`` [T, k] of the reference's most likely ones."""
    reference_logprobs: str

    def __call__(self, batch: TrainBatch) -> Tensor:
        """[T] float64 KL_t, nats; 0 outside the loss mask.

        Raises:
            FlowError: the flow did not compute the logprobs.
        """
        _check_present(batch, (self.policy_logprobs, self.reference_logprobs))
        policy, reference = batch.token_data[self.policy_logprobs], batch.token_data[self.reference_logprobs]
        if self.estimator == "full":
            return torch.where(batch.loss_mask, topk_kl(policy.double(), reference.double()), 0.0)
        x = masked_difference(reference.double(), policy.double(), batch.loss_mask)
        if self.clamps:
            x = x.clamp(-MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE)
        return kl_estimate(torch.zeros_like(x), x, self.estimator, clamp="none")


def scored_rewards(
    batch: TrainBatch, *, penalty: KLPenalty | None = None, bonus: Tensor | None = None
) -> ScoredRewards:
    """Return the rewards of a batch.

    Args:
        batch: with ``sequence_data["reward"]`` [S] and, where single tokens have rewards,
            ``token_data["token_rewards"]`` [T].
        penalty: a KL in the reward.
        bonus: [S] added to the verdicts.

    Raises:
        FlowError: the batch has no rewards.
    """
    verdicts = shaped = _verdicts(batch)
    of_sequences = batch.sequence_data["reward"].double() if batch.num_sequences else verdicts
    if bonus is not None:
        shaped, of_sequences = shaped + bonus, of_sequences + bonus
    tokens = rewards_at_actions(batch, of_sequences, batch.token_data.get("token_rewards"))
    outcomes = shaped
    metrics: Metrics = {}
    if batch.num_sequences:
        metrics["reward"] = Metric(float(verdicts.sum()), batch.num_sequences)
        metrics["reward_min"] = Metric(float(verdicts.min()), reducer="min")
        metrics["reward_max"] = Metric(float(verdicts.max()), reducer="max")
        if bonus is not None:
            metrics["reward_shaping"] = Metric(float(bonus.sum()), batch.num_sequences)
    if penalty is not None:
        kl = penalty(batch)
        tokens = tokens - penalty.coef * kl
        outcomes = outcomes - penalty.coef * kl.new_zeros(batch.num_sequences).index_add_(0, batch.sequence_index, kl)
        metrics["reward_kl"] = Metric(float(kl.sum()), float(batch.loss_mask.sum()))
    return ScoredRewards(verdicts, shaped, outcomes, tokens, metrics)


def components(batch: TrainBatch, weights: Mapping[str, float]) -> dict[str, Tensor]:
    """Name -> [S] float64 values of the named components of the rewards.

    Raises:
        FlowError: a component is missing; the message names it and the existing ones.
    """
    prefix = "reward/"
    there = {name.removeprefix(prefix) for name in batch.sequence_data if name.startswith(prefix)}
    missing = sorted(weights.keys() - there)
    if missing:
        raise FlowError(
            f"algorithm.options.rewards names {missing[0]!r}, which not every reward of samples {batch.sample_ids[0]} "
            f"... {batch.sample_ids[-1]} has as a component; all have {', '.join(sorted(there)) or 'none'}. Components"
            " are the parts of a reward role (roles.<reward>.parts), by their backends, and those that a reward returns"
        )
    return {name: batch.sequence_data[prefix + name].double() for name in weights}


def _verdicts(batch: TrainBatch) -> Tensor:
    """[S] float64 undiscounted returns: the verdict plus the rewards of single tokens, where there are any."""
    if not batch.num_sequences:
        return torch.zeros(0, dtype=torch.float64)
    rewards = batch.sequence_data.get("reward")
    if rewards is None:
        raise FlowError(
            f"samples {batch.sample_ids[0]} ... {batch.sample_ids[-1]} have no rewards. Advantages need one for every "
            "sample that is not excluded: join m.reward.score(samples) in the flow"
        )
    of_tokens = batch.token_data.get("token_rewards")
    if of_tokens is None:
        return rewards.double()
    bounds = batch.cu_seqlens.tolist()
    sums = [float(of_tokens[start:stop].sum()) for start, stop in pairwise(bounds)]
    return rewards.double() + torch.tensor(sums, dtype=torch.float64)


def _check_present(batch: TrainBatch, names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in batch.token_data]
    if missing and batch.num_sequences:
        raise FlowError(
            f"kl_placement=reward reads {', '.join(missing)}, which samples {batch.sample_ids[0]} ... "
            f"{batch.sample_ids[-1]} do not have (they have {', '.join(sorted(batch.token_data)) or 'nothing'}). The "
            "flow must join the outputs of policy and reference: <role>.logprobs(samples) gives <role>_logprobs"
        )
