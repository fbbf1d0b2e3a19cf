"""RLOO, REINFORCE++, its baseline form and MaxRL against loops written from the papers."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

from chatlearn_algorithms.cispo import CISPO
from chatlearn_algorithms.dapo import DAPO
from chatlearn_algorithms.grpo import GRPO
from chatlearn_algorithms.grpo_options import CISPOOptions, DAPOOptions, GRPOOptions
from chatlearn_algorithms.maxrl import MaxRL, mean_normalised
from chatlearn_algorithms.reinforce_options import (
    MaxRLOptions,
    ReinforcePPBaselineOptions,
    ReinforcePPOptions,
    RLOOOptions,
)
from chatlearn_algorithms.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from chatlearn_algorithms.rloo import RLOO, leave_one_out
from chatlearn_core.exceptions import FlowError
from chatlearn_core.types import Sample, TrainBatch, merge_metrics, pack_samples, scored_batch

DIVIDED: dict[str, Any] = {
    "rloo": (RLOO, RLOOOptions),
    "maxrl": (MaxRL, MaxRLOptions),
    "grpo": (GRPO, GRPOOptions),
    "dapo": (DAPO, DAPOOptions),
    "cispo": (CISPO, CISPOOptions),
}
"""Whose advantages look at whole groups alone."""
rewards_of_group = st.lists(st.floats(-5, 5), min_size=2, max_size=8)


def derive(algorithm: Any, samples: list[Sample], **token_data: torch.Tensor) -> tuple[TrainBatch, Any]:
    batch = scored_batch(samples)
    batch.token_data |= token_data
    return batch, algorithm.advantages(batch, 1)


@given(rewards=rewards_of_group)
def test_leave_one_out_is_a_loop_over_the_others(rewards):
    expected = [
        reward - statistics.fmean(rewards[:index] + rewards[index + 1 :]) for index, reward in enumerate(rewards)
    ]
    assert leave_one_out(np.array(rewards)).tolist() == pytest.approx(expected, abs=1e-9)
    # The known identity: G / (G − 1) of the distance to the group's mean.
    scale, mean = len(rewards) / (len(rewards) - 1), statistics.fmean(rewards)
    assert expected == pytest.approx([scale * (reward - mean) for reward in rewards], abs=1e-9)


def test_rloo_on_policy_is_reinforce_of_whole_completions(make_context, make_group):
    """The gradient of a token's logprob is −A_i / S: the sum over tokens of each of S completions, and their mean."""
    algorithm = RLOO(RLOOOptions(group_size=3), make_context())
    samples = make_group("a", [1.0, 0.0, 0.5], [2, 3, 4])
    batch, derived = derive(algorithm, samples)
    batch.token_data |= derived.token_data | {"trainer_logprobs": batch.token_data["generator_logprobs"]}
    [update] = algorithm.updates(1)
    batch = update.loss.prepare(batch)
    logprobs = batch.token_data["trainer_logprobs"].clone().requires_grad_()
    update.loss({"logprobs": logprobs, "entropy": torch.zeros_like(logprobs)}, batch).total.backward()
    expected = {"a@0#0": 0.75, "a@0#1": -0.75, "a@0#2": 0.0}
    for index, sample in enumerate(samples):
        part = slice(*batch.cu_seqlens[index : index + 2].tolist())
        slope = np.where(sample.loss_mask, -expected[sample.id] / 3, 0.0)
        assert logprobs.grad[part].tolist() == pytest.approx(slope.tolist(), abs=1e-7)


def test_rloo_takes_the_kl_from_the_reward(make_context, make_group):
    """R_i = r_i − β Σ_t (π_t − ref_t), then leave-one-out."""
    algorithm = RLOO(RLOOOptions(group_size=2, kl_coef=0.1), make_context(reference="trainer"))
    samples = make_group("a", [1.0, 0.0], [2, 4])
    batch = scored_batch(samples)
    policy, reference = torch.full((batch.num_tokens,), -1.0), torch.full((batch.num_tokens,), -1.5)
    _, derived = derive(algorithm, samples, trainer_logprobs=policy, reference_logprobs=reference)
    shaped = [1.0 - 0.1 * 0.5 * 2, 0.0 - 0.1 * 0.5 * 4]
    assert derived.sequence_data["advantage"].tolist() == pytest.approx([shaped[0] - shaped[1], shaped[1] - shaped[0]])
    assert algorithm.loss().kl_coef == 0, "it does not count twice"


def loop_reinforce_pp(samples: list[Sample], kl: list[float], beta: float, gamma: float) -> list[float]:
    """Returns of each token, then normalised over all of them."""
    returns: list[float] = []
    mask: list[bool] = []
    start = 0
    for sample in samples:
        actions = [t for t in range(len(sample.token_ids)) if sample.loss_mask[t]]
        rewards = {t: -beta * kl[start + t] + (sample.reward.value if t == actions[-1] else 0.0) for t in actions}
        for t in range(len(sample.token_ids)):
            later = [s for s in actions if s >= t]
            discounted = sum(gamma ** (later.index(s)) * rewards[s] for s in later)
            returns.append(discounted if t in rewards else 0.0)
            mask.append(t in rewards)
        start += len(sample.token_ids)
    chosen = [value for value, sampled in zip(returns, mask, strict=True) if sampled]
    mean, spread = statistics.fmean(chosen), (statistics.variance(chosen) + 1e-8) ** 0.5
    return [(value - mean) / spread if sampled else 0.0 for value, sampled in zip(returns, mask, strict=True)]


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(gamma=st.sampled_from([0.0, 0.9, 1.0]), beta=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 50))
def test_reinforce_pp_equals_the_loop(make_context, make_group, gamma, beta, seed):
    options = ReinforcePPOptions(gamma=gamma, kl_coef=beta)
    algorithm = ReinforcePP(options, make_context(reference="trainer"))
    samples = [*make_group("a", [1.0]), *make_group("bb", [0.0, 0.3]), *make_group("c", [0.5], [5])]
    generator = torch.Generator().manual_seed(seed)
    policy, reference = (-torch.rand(scored_batch(samples).num_tokens, generator=generator) for _ in range(2))
    _, derived = derive(algorithm, samples, trainer_logprobs=policy, reference_logprobs=reference)
    expected = loop_reinforce_pp(samples, (policy - reference).tolist(), beta, gamma)
    assert derived.token_data["advantages"].tolist() == pytest.approx(expected, abs=1e-5)
    assert algorithm.advantage_split == "batch"
    assert not derived.exclusions
    assert "zero_spread_groups" not in derived.metrics, "its groups may have one completion"


def test_the_baseline_is_the_groups_mean(make_context, make_group):
    """Rewards 3, 1 and 10, 10: centred 1, −1, 0, 0 on 2, 3, 2 and 3 tokens, then normalised over the ten tokens."""
    algorithm = ReinforcePPBaseline(ReinforcePPBaselineOptions(group_size=2), make_context())
    samples = [*make_group("a", [3.0, 1.0]), *make_group("b", [10.0, 10.0])]
    _, derived = derive(algorithm, samples)
    centred = [1.0] * 2 + [-1.0] * 3 + [0.0] * 5
    mean, spread = statistics.fmean(centred), (statistics.variance(centred) + 1e-8) ** 0.5
    mask = scored_batch(samples).loss_mask
    found = derived.token_data["advantages"][mask].tolist()
    assert found == pytest.approx([(value - mean) / spread for value in centred], abs=1e-6)
    assert derived.metrics["zero_spread_groups"].value == 0.5


def test_what_is_excluded_takes_no_part_in_the_normalisation(make_context, make_group):
    options = ReinforcePPBaselineOptions(group_size=2, drop_zero_spread_groups=True)
    algorithm = ReinforcePPBaseline(options, make_context())
    alone, flat, spread = make_group("a", [100.0]), make_group("b", [7.0, 7.0]), make_group("c", [3.0, 1.0])
    batch, derived = derive(algorithm, [*alone, *flat, *spread])
    assert derived.exclusions == {
        "a@0#0": "group_too_small",
        "b@0#0": "zero_spread_group",
        "b@0#1": "zero_spread_group",
    }
    _, only = derive(algorithm, spread)
    kept = batch.sequence_index >= 3
    assert derived.token_data["advantages"][kept].tolist() == only.token_data["advantages"].tolist()


@given(rewards=st.lists(st.floats(0, 5), min_size=2, max_size=8))
def test_mean_normalised_equals_the_formula(rewards):
    mean = statistics.fmean(rewards)
    expected = [(reward - mean) / mean if mean > 0 else 0.0 for reward in rewards]
    assert mean_normalised(np.array(rewards)).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_maxrl_is_the_gradient_of_the_logarithm_of_success(make_context, make_group):
    """Success rate 1/4: the one right answer weighs 3, each wrong one −1; GRPO without std: 3/4 and −1/4."""
    algorithm = MaxRL(MaxRLOptions(group_size=4), make_context())
    _, derived = derive(algorithm, make_group("a", [1.0, 0.0, 0.0, 0.0]))
    assert derived.sequence_data["advantage"].tolist() == [3, -1, -1, -1]
    _, derived = derive(algorithm, make_group("a", [0.0, 0.0]))
    assert derived.sequence_data["advantage"].tolist() == [0, 0]


def test_maxrl_refuses_negative_rewards(make_context, make_group):
    algorithm = MaxRL(MaxRLOptions(group_size=2), make_context())
    with pytest.raises(FlowError, match=r"sample a@0#1: its reward is -0\.5, and maxrl .* Let the reward give 0"):
        derive(algorithm, make_group("a", [1.0, -0.5]))


@pytest.mark.parametrize("algorithm", [RLOO, MaxRL, ReinforcePPBaseline])
def test_a_group_of_one_is_excluded(make_context, make_group, algorithm):
    options = {RLOO: RLOOOptions, MaxRL: MaxRLOptions, ReinforcePPBaseline: ReinforcePPBaselineOptions}[algorithm]
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        options(group_size=1)
    _, derived = derive(algorithm(options(), make_context()), make_group("a", [1.0]))
    assert derived.exclusions == {"a@0#0": "group_too_small"}


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
@pytest.mark.parametrize("name", ["rloo", "maxrl", "reinforce_pp", "reinforce_pp_baseline"])
def test_order_changes_nothing(make_context, make_group, name, order):
    algorithms: dict[str, Any] = {
        "rloo": (RLOO, RLOOOptions),
        "maxrl": (MaxRL, MaxRLOptions),
        "reinforce_pp": (ReinforcePP, ReinforcePPOptions),
        "reinforce_pp_baseline": (ReinforcePPBaseline, ReinforcePPBaselineOptions),
    }
    factory, options = algorithms[name]
    samples = [*make_group("a", [3.0, 1.0]), *make_group("b", [1.0, 0.0])]
    by_id = []
    for of in ([0, 1, 2, 3], order):
        batch, derived = derive(factory(options(), make_context()), [samples[i] for i in of])
        rows = derived.token_data["advantages"].split(batch.lengths)
        by_id.append({samples[i].id: row for i, row in zip(of, rows, strict=True)})
    for sample in samples:
        torch.testing.assert_close(by_id[0][sample.id], by_id[1][sample.id], rtol=1e-6, atol=1e-6)


def test_pack_samples_takes_what_is_derived(make_context, make_group):
    """What an algorithm adds has one entry a token."""
    samples = make_group("a", [1.0, 0.0])
    _, derived = derive(RLOO(RLOOOptions(), make_context()), samples)
    assert derived.token_data["advantages"].shape == pack_samples(samples).token_ids.shape


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)  # nothing is changed
@given(data=st.data())
@pytest.mark.parametrize("name", ["rloo", "maxrl", "grpo", "dapo", "cispo"])
def test_ranks_that_share_the_groups_give_what_one_gives(make_context, make_group, name, data):
    """Groups are divided over data-parallel ranks; their parts and metrics are those of the whole."""
    factory, options = DIVIDED[name]
    algorithm = factory(options(drop_zero_spread_groups=True), make_context())
    verdicts = data.draw(
        st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4), min_size=2, max_size=5)
    )
    groups = [make_group(f"g{number}", of_group) for number, of_group in enumerate(verdicts)]
    rank_of = data.draw(st.lists(st.integers(0, 1), min_size=len(groups), max_size=len(groups)))
    batch, whole = derive(algorithm, [sample for group in groups for sample in group])
    rows = dict(zip(batch.sample_ids, whole.token_data["advantages"].split(batch.lengths), strict=True))
    exclusions, metrics = {}, []
    for rank in (0, 1):
        own = [sample for group, of in zip(groups, rank_of, strict=True) if of == rank for sample in group]
        if not own:
            continue
        part, derived = derive(algorithm, own)
        exclusions |= derived.exclusions
        metrics.append(derived.metrics)
        for sample_id, row in zip(part.sample_ids, derived.token_data["advantages"].split(part.lengths), strict=True):
            assert torch.equal(row, rows[sample_id])
    assert exclusions == whole.exclusions
    merged = {name: metric.value for name, metric in merge_metrics(*metrics).items()}
    assert merged == pytest.approx({name: metric.value for name, metric in whole.metrics.items()})
