from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_losses import discounted_returns, gae, rewards_at_actions, whiten


def loop_gae(rewards: list[float], values: list[float], mask: list[int], gamma: float, lam: float) -> list[float]:
    """Eq. 16 as the sum that it is: A_t = Σ_l (γλ)^l δ_{t+l}, over the tokens that the policy sampled."""
    actions = [t for t, sampled in enumerate(mask) if sampled]
    advantages = [0.0] * len(mask)
    for first in range(len(actions)):
        for later in range(first, len(actions)):
            following = values[actions[later + 1]] if later + 1 < len(actions) else 0.0
            delta = rewards[actions[later]] + gamma * following - values[actions[later]]
            advantages[actions[first]] += (gamma * lam) ** (later - first) * delta
    return advantages


masks = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=5)
share = st.sampled_from([0.0, 0.5, 0.95, 1.0])


@given(masks=masks, gamma=share, lam=share, seed=st.integers(0, 99))
def test_gae_equals_the_loop(make_batch, masks, gamma, lam, seed):
    batch = make_batch(masks)
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(batch.num_tokens, generator=generator).double() for _ in range(2))
    found = gae(rewards, values, batch, gamma=gamma, lam=lam)
    starts = batch.cu_seqlens.tolist()
    expected: list[float] = []
    for index, mask in enumerate(masks):
        part = slice(starts[index], starts[index + 1])
        expected += loop_gae(rewards[part].tolist(), values[part].tolist(), mask, gamma, lam)
    assert found.advantages.tolist() == pytest.approx(expected, abs=1e-9)
    returns = torch.tensor(expected).double() + torch.where(batch.loss_mask, values, 0.0)
    assert found.returns.tolist() == pytest.approx(returns.tolist(), abs=1e-6)


def test_closed_forms(make_batch):
    """λ = 0: one-step differences; λ = 1: returns minus values; rewards 1, 2, 3 and γ = 1/2 return 2.75, 3.5, 3."""
    batch = make_batch([[0, 1, 1, 1]])
    rewards, values = torch.tensor([9.0, 1.0, 2.0, 3.0]), torch.tensor([9.0, 0.5, 1.0, 1.5])
    assert gae(rewards, values, batch, gamma=0.5, lam=0.0).advantages.tolist() == [0, 1.0, 1.75, 1.5]
    whole = gae(rewards, values, batch, gamma=0.5, lam=1.0)
    assert whole.returns.tolist() == [0, 2.75, 3.5, 3.0]
    assert whole.advantages.tolist() == [0, 2.25, 2.5, 1.5]
    assert discounted_returns(rewards, batch, gamma=0.5).tolist() == [0, 2.75, 3.5, 3.0]


def test_a_gap_changes_nothing(make_batch):
    """A tool's answer of two tokens between two turns: advantages are those of the turns side by side."""
    near, apart = make_batch([[0, 1, 1, 1]]), make_batch([[0, 1, 0, 0, 1, 1]])
    rewards, values = [0.0, 1.0, 2.0, 3.0], [0.0, 0.3, 0.2, 0.1]
    wide = [torch.tensor([of[0], of[1], 7.0, torch.nan, of[2], of[3]]) for of in (rewards, values)]
    found = gae(*wide, apart, gamma=0.9, lam=0.8).advantages[apart.loss_mask]
    expected = gae(torch.tensor(rewards), torch.tensor(values), near, gamma=0.9, lam=0.8).advantages[near.loss_mask]
    assert found.tolist() == expected.tolist()


def test_nothing_at_all(make_batch):
    for batch in (make_batch([]), make_batch([[0, 0]])):
        none = torch.zeros(batch.num_tokens)
        assert gae(none, none, batch, gamma=1.0, lam=1.0).advantages.tolist() == none.tolist()
        assert rewards_at_actions(batch, torch.ones(batch.num_sequences), none).tolist() == none.tolist()


@given(values=st.lists(st.floats(-100, 100), min_size=2, max_size=20), data=st.data())
def test_whitening_equals_the_statistics_module(values, data):
    import statistics

    mask = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    chosen = [value for value, kept in zip(values, mask, strict=True) if kept]
    found = whiten(torch.tensor(values, dtype=torch.float64), torch.tensor(mask))
    if len(chosen) < 2:
        expected = chosen
    else:
        mean, variance = statistics.fmean(chosen), statistics.variance(chosen)
        expected = [(value - mean) / (variance + 1e-8) ** 0.5 for value in chosen]
    assert found[torch.tensor(mask)].tolist() == pytest.approx(expected, abs=1e-6)
    assert not found[~torch.tensor(mask)].any()


def test_rewards_go_to_what_was_sampled(make_batch):
    """An outcome to the last action; a tool's token's reward to the action before it, a prompt's to the first."""
    batch = make_batch([[0, 1, 1, 0, 1, 0], [0, 0]])
    of_tokens = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 3.0, 3.0])
    found = rewards_at_actions(batch, torch.tensor([100.0, 100.0]), of_tokens)
    assert found.tolist() == [0, 1.5, 6.0, 0, 124.0, 0, 0, 0]
    assert rewards_at_actions(batch, torch.tensor([100.0, 100.0])).tolist() == [0, 0, 0, 0, 100.0, 0, 0, 0]
