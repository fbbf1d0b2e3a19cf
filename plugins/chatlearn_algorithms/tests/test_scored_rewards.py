from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_algorithms.reinforce_options import RLOOOptions
from chatlearn_algorithms.rloo import RLOO
from chatlearn_algorithms.scored_rewards import KLPenalty, components, scored_rewards
from chatlearn_core.exceptions import FlowError
from chatlearn_core.types import RewardResult, SamplingParams, TrainBatch, scored_batch
from chatlearn_testing.suites.algorithm_roles import VOCAB
from chatlearn_testing.suites.algorithm_step import AlgorithmSetup, AlgorithmStep
from chatlearn_testing.suites.conformance_suite import installed_plugins


def with_logprobs(batch: TrainBatch, seed: int = 0) -> TrainBatch:
    generator = torch.Generator().manual_seed(seed)
    for name in ("trainer_logprobs", "reference_logprobs"):
        batch.token_data[name] = -torch.rand(batch.num_tokens, generator=generator)
    return batch


@given(coef=st.floats(0, 2), seed=st.integers(0, 9))
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_is_taken_token_by_token(make_group, estimator, coef, seed):
    """r_t = 1[t last] · r − β k(ref_t − π_t), and outcomes are their sums; verdicts stay."""
    samples = make_group("a", [1.0, 0.5])
    batch = with_logprobs(scored_batch(samples), seed)
    penalty = KLPenalty(coef, estimator, True, "trainer_logprobs", "reference_logprobs")
    scored = scored_rewards(batch, penalty=penalty)
    policy, reference = (batch.token_data[f"{role}_logprobs"].tolist() for role in ("trainer", "reference"))
    expected, kls, start = [], [], 0
    for sample in samples:
        last = len(sample.token_ids) - 1
        for t, sampled in enumerate(sample.loss_mask):
            x = reference[start + t] - policy[start + t]
            kl = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - x - 1}[estimator] if sampled else 0.0
            expected.append((sample.reward.value if t == last else 0.0) - coef * kl)
            kls.append(kl)
        start += last + 1
    assert scored.tokens.tolist() == pytest.approx(expected, abs=1e-6)
    lengths = batch.lengths
    sums = [sum(expected[: lengths[0]]), sum(expected[lengths[0] :])]
    assert scored.outcomes.tolist() == pytest.approx(sums, abs=1e-6)
    assert scored.verdicts.tolist() == [1.0, 0.5]
    assert scored.metrics["reward_kl"].value == pytest.approx(sum(kls) / int(batch.loss_mask.sum()), abs=1e-6)
    assert scored.metrics["reward"].value == 0.75


@pytest.mark.parametrize("recomputed", [True, False])
def test_a_full_kl_in_the_reward_is_the_sum_over_the_vocabulary(recomputed):
    """Through the flow: each token's KL between the tables of policy and reference, at the sampling temperature."""
    options = RLOOOptions(
        group_size=3,
        kl_coef=0.3,
        kl_estimator="full",
        kl_top_k=VOCAB,
        kl_placement="reward",
        recompute_old_logprobs=recomputed,
    )
    roles = dict(options.required_roles) | {"reference": "trainer"}
    sampling = SamplingParams(6, temperature=0.7)
    step = AlgorithmStep(AlgorithmSetup(installed_plugins(), lambda made: RLOO(options, made), roles, sampling))
    samples = step.samples()
    assert ("trainer_logprobs" in samples[0].token_data) == recomputed
    metrics = step.derived(samples)
    policy, reference = (
        (step.roles.trainers[role].table("logits", VOCAB, VOCAB).detach() / 0.7).log_softmax(-1)
        for role in ("trainer", "reference")
    )
    total, outcomes = 0.0, {}
    for sample in samples:
        kl = 0.0
        for t in sample.loss_mask.nonzero()[0].tolist():
            before = int(sample.token_ids[t - 1])
            kl += sum(
                math.exp(p) * (p - q) for p, q in zip(policy[before].tolist(), reference[before].tolist(), strict=True)
            )
        total += kl
        outcomes.setdefault(sample.group_id, {})[sample.id] = sample.reward.value - 0.3 * kl
    tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    assert metrics["reward_kl"].value == pytest.approx(total / tokens, rel=1e-5)
    for sample in samples:
        of_group = outcomes[sample.group_id]
        others = [value for name, value in of_group.items() if name != sample.id]
        expected = of_group[sample.id] - sum(others) / len(others)
        assert sample.token_data["advantages"][sample.loss_mask].tolist() == pytest.approx(
            [expected] * int(sample.loss_mask.sum()), rel=1e-4, abs=1e-5
        )


def test_a_token_of_probability_0_leaves_the_others_finite(make_group):
    batch = with_logprobs(scored_batch(make_group("a", [1.0, 0.5])))
    never = int(batch.loss_mask.nonzero()[0])
    batch.token_data["reference_logprobs"][never] = -torch.inf
    batch.token_data["reference_logprobs"][0] = torch.nan  # a prompt's token
    names = ("trainer_logprobs", "reference_logprobs")
    cut = scored_rewards(batch, penalty=KLPenalty(0.1, "k1", True, *names))
    assert cut.tokens[never].item() == pytest.approx(-0.1 * 20)
    assert cut.tokens.isfinite().all()
    assert scored_rewards(batch, penalty=KLPenalty(0.1, "k1", False, *names)).tokens[never] == -torch.inf


def test_token_rewards_and_shaping_add_up(make_group):
    samples = make_group("a", [1.0, 0.0], lengths=[2, 3])
    samples[0].reward = RewardResult(1.0, token_values=np.array([0.25, 0.75], dtype=np.float32))
    scored = scored_rewards(scored_batch(samples), bonus=torch.tensor([-0.5, -1.0], dtype=torch.float64))
    assert scored.verdicts.tolist() == [2.0, 0.0]
    assert scored.outcomes.tolist() == [1.5, -1.0]
    assert scored.tokens.tolist() == [0, 0, 0, 0.25, 1.25, 0, 0, 0, 0, 0, -1.0]
    assert scored.metrics["reward_shaping"].value == -0.75


def test_what_is_missing_is_named(make_group):
    batch = scored_batch(make_group("a", [1.0, 0.0]))
    with pytest.raises(FlowError, match="reads trainer_logprobs, reference_logprobs, which samples"):
        scored_rewards(batch, penalty=KLPenalty(0.1, "k1", True, "trainer_logprobs", "reference_logprobs"))
    batch.sequence_data["reward/format"] = torch.zeros(2)
    with pytest.raises(FlowError, match=r"rewards names 'correct', which not every reward .* all have format\."):
        components(batch, {"correct": 1.0, "format": 0.5})


def test_components_of_rewards_reach_the_batch(make_group):
    samples = make_group("a", [1.0, 0.0])
    samples[0].reward = RewardResult(1.0, {"correct": 1.0, "format": 0.0, "rare": 3.0})
    samples[1].reward = RewardResult(0.0, {"correct": 0.0, "format": 0.5})
    found = components(scored_batch(samples), {"format": 2.0, "correct": 1.0})
    assert {name: values.tolist() for name, values in found.items()} == {"format": [0.0, 0.5], "correct": [1.0, 0.0]}
    assert "reward/rare" not in scored_batch(samples).sequence_data
