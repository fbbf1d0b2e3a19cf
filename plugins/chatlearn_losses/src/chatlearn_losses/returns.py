"""Returns and advantages from per-token rewards: discounted sums, GAE, and their normalisation.

Only tokens of the loss mask are actions. What stands between them (a tool's answer, a hint) takes no part: the value
and the advantage of the next action are carried over it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from chatlearn_core.types import TrainBatch

WHITENING_EPSILON = 1e-8
"""Added to the variance, as PPO implementations do (TRL, verl)."""


class Advantages(NamedTuple):
    """Of every action; 0 elsewhere."""

    advantages: Tensor
    """[T] float64"""
    returns: Tensor
    """[T] float64, advantages plus values: what a critic learns."""


def gae(rewards: Tensor, values: Tensor, batch: TrainBatch, *, gamma: float, lam: float) -> Advantages:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16): δ_t = r_t + γ V_{t+1} − V_t, A_t = δ_t + γλ A_{t+1}.

    A sequence ends in a state of value 0.

    Args:
        rewards: [T] of each token; read where the loss mask is True.
        values: [T] V_t, of the state in which token t was chosen.
        batch: gives the loss mask and the sequences, which must be whole.
        gamma: discount, in [0, 1].
        lam: λ in [0, 1]; 0: one-step differences, 1: discounted returns minus values.
    """
    actions = _actions(batch)
    reward, value = (actions.rows(of_token) for of_token in (rewards, values))
    advantage = torch.zeros_like(reward)
    following_advantage, following_value = reward.new_zeros(len(reward)), reward.new_zeros(len(reward))
    for step in reversed(range(reward.shape[1])):
        delta = reward[:, step] + gamma * following_value - value[:, step]
        following_advantage = delta + gamma * lam * following_advantage
        following_value = value[:, step]
        advantage[:, step] = following_advantage
    return Advantages(actions.tokens(advantage), actions.tokens(advantage + value))


def discounted_returns(rewards: Tensor, batch: TrainBatch, *, gamma: float) -> Tensor:
    """[T] float64 G_t = Σ_{s ≥ t} γ^(s−t) r_s over the actions of a sequence; 0 where the loss mask is False.

    Args:
        rewards: [T] of each token.
        batch: gives the loss mask and the sequences, which must be whole.
        gamma: discount, in [0, 1].
    """
    return gae(rewards, torch.zeros_like(rewards), batch, gamma=gamma, lam=1.0).returns


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x − mean) / √(variance + ε) over the entries where ``mask`` is True, with the unbiased variance; 0 elsewhere.

    One entry alone has no spread to be measured by, and stays as it is.

    Args:
        values: [N]
        mask: [N] bool
    """
    chosen = values[mask].double()
    if len(chosen) > 1:
        chosen = (chosen - chosen.mean()) / (chosen.var() + WHITENING_EPSILON).sqrt()
    return values.new_zeros(values.shape, dtype=torch.float64).masked_scatter(mask, chosen)


def rewards_at_actions(batch: TrainBatch, outcomes: Tensor, of_tokens: Tensor | None = None) -> Tensor:
    """[T] float64: the reward of each action, an outcome at its sequence's last one.

    Args:
        batch: gives the loss mask and the sequences.
        outcomes: [S] rewards of whole sequences.
        of_tokens: [T] rewards of single tokens. That of a token which is no action counts for the action before it, or
            for the first one where none is before. A sequence without an action has no rewards.
    """
    actions = _actions(batch)
    sequence = batch.sequence_index
    rows = outcomes.new_zeros((batch.num_sequences, actions.longest), dtype=torch.float64)
    if of_tokens is not None and actions.longest:
        rows.index_put_((sequence, actions.latest), of_tokens.double(), accumulate=True)
    acting = actions.counts > 0
    last = (actions.counts - 1)[acting]
    rows[acting.nonzero().squeeze(-1), last] += outcomes.double()[acting]
    return actions.tokens(rows)


class _Actions(NamedTuple):
    """Where the actions of a batch stand: the k-th of sequence s is entry [s, k] of a rectangle."""

    mask: Tensor
    """[T] bool"""
    sequence: Tensor
    """[A] of each action."""
    number: Tensor
    """[A] which action of its sequence it is."""
    counts: Tensor
    """[S] actions."""
    latest: Tensor
    """[T] the action at or before each token, or the first."""
    longest: int

    def rows(self, of_token: Tensor) -> Tensor:
        """[S, longest] float64: values of actions, 0 behind a sequence's last."""
        rows = of_token.new_zeros((len(self.counts), self.longest), dtype=torch.float64)
        rows[self.sequence, self.number] = of_token[self.mask].double()
        return rows

    def tokens(self, rows: Tensor) -> Tensor:
        """[T] the same of tokens, 0 where the mask is False."""
        found = rows.new_zeros(self.mask.shape)
        found[self.mask] = rows[self.sequence, self.number]
        return found


def _actions(batch: TrainBatch) -> _Actions:
    mask, sequence = batch.loss_mask, batch.sequence_index
    one = mask.long()
    counts = one.new_zeros(batch.num_sequences).index_add_(0, sequence, one)
    before = counts.cumsum(0) - counts
    latest = (one.cumsum(0) - 1 - before[sequence]).clamp(min=0)
    longest = int(counts.max()) if len(counts) else 0
    return _Actions(mask, sequence[mask], latest[mask], counts, latest, longest)
