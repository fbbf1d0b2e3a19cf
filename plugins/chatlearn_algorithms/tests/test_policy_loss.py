from __future__ import annotations

import math
import pickle
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from chatlearn_algorithms.cispo import ClippedWeight
from chatlearn_algorithms.gspo import SequenceClip
from chatlearn_algorithms.objectives import Clip
from chatlearn_algorithms.policy_loss import ImportanceCorrection, PolicyLoss
from chatlearn_core.exceptions import FlowError
from chatlearn_core.types import Sample, TrainBatch, merge_metrics, pack_samples
from chatlearn_losses import AggregationMode

VOCABULARY = 9
TOP_K = 3
LENGTHS = [4, 1, 6, 3, 2]
ADVANTAGES = [1.2, -0.7, 0.4, -1.5, 0.6]


class TinyPolicy:
    """Logits for every token from a table by the preceding token: enough to have shared gradients."""

    def __init__(self) -> None:
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(2))
        self.table = self.table.double().requires_grad_()

    def outputs(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        log_probs = self.table.log_softmax(-1)[batch.token_ids.roll(1)]
        logprobs = log_probs.gather(-1, batch.token_ids[:, None]).squeeze(-1)
        outputs = {"logprobs": logprobs, "entropy": -(log_probs.exp() * log_probs).sum(-1)}
        if "reference_topk_ids" in batch.token_data:
            outputs["logprobs_at"] = log_probs.gather(-1, batch.token_data["reference_topk_ids"])
        return outputs


@pytest.fixture
def samples(make_group) -> list[Sample]:
    """Two groups; trainer, generator and reference are near enough to the policy for every clip to matter."""
    group = [*make_group("a", [0.0] * 3, LENGTHS[:3]), *make_group("bb", [0.0] * 2, LENGTHS[3:])]
    generator, chosen = np.random.default_rng(3), np.random.default_rng(4)
    for sample, advantage in zip(group, ADVANTAGES, strict=True):
        current = TinyPolicy().outputs(pack_samples([sample]))["logprobs"].detach().numpy()
        for role in ("trainer", "generator", "reference"):
            other = current + generator.normal(0, 0.5, len(current))
            sample.token_data[f"{role}_logprobs"] = np.where(sample.loss_mask, other, 0).astype(np.float32)
        sample.token_data["reference_topk_ids"] = np.stack(
            [chosen.permutation(VOCABULARY)[:TOP_K] for _ in sample.token_ids]
        )
        shares = chosen.dirichlet(np.ones(TOP_K + 1), len(sample.token_ids))[:, :TOP_K]
        sample.token_data["reference_topk_logprobs"] = np.log(shares).astype(np.float32)
        sample.token_data["advantages"] = np.where(sample.loss_mask, advantage, 0).astype(np.float32)
    return group


SETTINGS = {
    "plain": {},
    "asymmetric dual clip": {"objective": Clip(0.1, 0.4, 1.5), "aggregation": "token_mean"},
    "clip of sequences": {"objective": SequenceClip(0.05, 0.05)},
    "dual clip of sequences": {"objective": SequenceClip(0.05, 0.05, 1.02)},
    "clipped weights": {"objective": ClippedWeight(0.1, 0.3), "aggregation": "token_mean"},
    "weights clipped from above": {"objective": ClippedWeight(1.0, 0.3), "kl_coef": 0.2},
    "whole kl": {"kl_coef": 0.3, "kl_estimator": "full", "aggregation": "token_mean"},
    "kl and entropy": {"kl_coef": 0.3, "entropy_coef": 0.1, "aggregation": "seq_mean_token_sum"},
    "straight-through kl": {"kl_coef": 0.3, "kl_estimator": "k1_straight_through", "aggregation": "prompt_mean"},
    "ratio-weighted kl": {"kl_coef": 0.3, "kl_weight": "ratio", "kl_clamp": "none"},
    "generator-weighted kl": {"kl_coef": 0.3, "kl_estimator": "k1", "kl_weight": "generator_ratio"},
    "kl with its score": {"kl_coef": 0.3, "kl_weight": "score", "kl_clamp": "all"},
    "dr_grpo": {"aggregation": "seq_mean_token_sum_norm", "constant_length": 16},
    "truncated": {"correction": ImportanceCorrection("truncate", "token", 1.2)},
    "truncated sequences": {"correction": ImportanceCorrection("truncate", "sequence", 1.2, 0.8)},
    "masked by sequences": {"correction": ImportanceCorrection("mask", "sequence_geometric", 1.3)},
    "masked by products": {"correction": ImportanceCorrection("mask", "sequence", 1.5)},
    "masked sequences": {"correction": ImportanceCorrection("mask_sequences", "sequence_geometric", 1.3)},
    "masked sequences by products": {"correction": ImportanceCorrection("mask_sequences", "sequence", 1.5)},
    "generator as old": {"old_logprobs": "generator_logprobs"},
}


def loop_loss(policy: TinyPolicy, samples: list[Sample], loss: PolicyLoss) -> torch.Tensor:
    """The same objective written token by token from the formulas, on unpacked sequences."""
    log_probs = policy.table.log_softmax(-1)
    groups: dict[str, int] = {}
    for sample in samples:
        groups[sample.group_id] = groups.get(sample.group_id, 0) + int(sample.loss_mask.sum())
    num_tokens = sum(groups.values())
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        masked = [t for t in range(len(sample.token_ids)) if sample.loss_mask[t]]
        data = {name: [float(x) for x in values] for name, values in sample.token_data.items() if values.ndim == 1}
        old, generated = data[loss.old_logprobs], data["generator_logprobs"]
        gaps = {t: old[t] - generated[t] for t in masked}
        for t in masked:
            row = log_probs[int(sample.token_ids[t - 1])]
            new = row[int(sample.token_ids[t])]
            ratio, advantage = torch.exp(new - old[t]), data["advantages"][t]
            objective = loss.objective
            if isinstance(objective, SequenceClip):
                # Eq. 5 to 7: the gradient goes through the sequence's own ratio. Advantages are the same at its tokens.
                gap = [log_probs[int(sample.token_ids[i - 1])][int(sample.token_ids[i])] - old[i] for i in masked]
                ratio = torch.exp(sum(gap) / len(gap))
            if isinstance(objective, ClippedWeight):
                weight = min(max(ratio.item(), 1 - objective.low), 1 + objective.high)
                term = -weight * advantage * new
            else:
                clipped = torch.clamp(ratio, 1 - objective.low, 1 + objective.high)
                term = -torch.min(ratio * advantage, clipped * advantage)
                if objective.dual is not None and advantage < 0:
                    term = torch.min(term, torch.tensor(-advantage * objective.dual, dtype=torch.float64))
            if loss.correction is not None:
                of_sequence = sum(gaps.values())
                levels = {"token": gaps[t], "sequence": of_sequence, "sequence_geometric": of_sequence / len(gaps)}
                weight, limit = math.exp(levels[loss.correction.level]), loss.correction.threshold
                inside = (loss.correction.minimum or 1 / limit) <= weight <= limit
                if loss.correction.mode == "truncate":
                    term = term * min(max(weight, loss.correction.minimum or 0.0), limit)
                elif loss.correction.mode == "mask":
                    term = term * (weight if inside else 0.0)
                else:
                    term = term * (math.exp(gaps[t]) if inside else 0.0)
            if loss.kl_coef:
                x = data["reference_logprobs"][t] - new
                sampled_by = {"ratio": old[t], "generator_ratio": generated[t], "score": new.detach()}
                if loss.kl_estimator == "full":
                    chosen = sample.token_data["reference_topk_ids"][t].tolist()
                    reference = sample.token_data["reference_topk_logprobs"][t].tolist()
                    kl = sum(row[v].exp() * (row[v] - log_q) for v, log_q in zip(chosen, reference, strict=True))
                    rest = 1 - sum(row[v].exp() for v in chosen)
                    kl = kl + rest * (rest / (1 - sum(map(math.exp, reference)))).log()
                elif loss.kl_estimator == "k3":
                    kl = torch.exp(x) - x - 1
                elif loss.kl_estimator == "k1":
                    kl = -x
                else:  # value of k1, gradient of k2
                    kl = (-x).detach() + (x * x / 2) - (x * x / 2).detach()
                if loss.kl_weight != "none":
                    kl = kl * torch.exp(new - sampled_by[loss.kl_weight])
                term = term + loss.kl_coef * kl
            if loss.entropy_coef:
                term = term + loss.entropy_coef * (row.exp() * row).sum()
            denominator = {
                "token_mean": num_tokens,
                "seq_mean_token_mean": len(samples) * len(masked),
                "seq_mean_token_sum": len(samples),
                "seq_mean_token_sum_norm": len(samples) * (loss.constant_length or 0),
                "prompt_mean": len(groups) * groups[sample.group_id],
            }[loss.aggregation]
            total = total + term / denominator
    return total


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_value_and_gradient_equal_the_loop(samples, settings):
    policy, loss = TinyPolicy(), PolicyLoss(**settings)
    batch = loss.prepare(pack_samples(samples))
    total = loss(policy.outputs(batch), batch).total
    expected = loop_loss(policy, samples, loss)
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(total, policy.table)
    (expected_gradient,) = torch.autograd.grad(expected, policy.table)
    assert expected_gradient.abs().max() > 1e-3
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


STOPPED = ("straight-through kl", "kl with its score", "clipped weights", "weights clipped from above")
"""Settings with a part whose gradient is not that of its value, on purpose."""


@pytest.mark.parametrize("settings", [SETTINGS[name] for name in SETTINGS if name not in STOPPED])
def test_the_gradient_is_the_slope_of_the_value(samples, settings):
    """Central differences in float64, of ten entries of the table. A sequence's ratio moves with all its tokens."""
    policy, loss = TinyPolicy(), PolicyLoss(**settings)
    batch = loss.prepare(pack_samples(samples))
    batch.token_data = {name: of.double() if of.is_floating_point() else of for name, of in batch.token_data.items()}
    (gradient,) = torch.autograd.grad(loss(policy.outputs(batch), batch).total, policy.table)
    largest = gradient.abs().flatten().topk(10).indices.tolist()
    for entry in largest:
        sides = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                policy.table.view(-1)[entry] += step
                if isinstance(loss.objective, SequenceClip):
                    sides.append(loop_loss(policy, samples, loss).item())
                else:
                    sides.append(loss(policy.outputs(batch), batch).total.item())
                policy.table.view(-1)[entry] -= step
        assert gradient.view(-1)[entry].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("name", ["asymmetric dual clip", "dual clip of sequences"])
def test_the_settings_reach_every_clip(samples, name):
    """Otherwise the comparison above would not see a wrong clip."""
    loss = PolicyLoss(**SETTINGS[name])
    batch = loss.prepare(pack_samples(samples))
    metrics = loss(TinyPolicy().outputs(batch), batch).metrics
    assert metrics["pg_clipfrac"].total >= 1
    assert metrics["pg_clipfrac_lower"].total >= 1


@pytest.mark.parametrize("name", [name for name, of in SETTINGS.items() if "correction" in of])
def test_corrections_limit_some_tokens_and_leave_others(samples, name):
    loss = PolicyLoss(**SETTINGS[name])
    batch = loss.prepare(pack_samples(samples))
    assert 0 < loss(TinyPolicy().outputs(batch), batch).metrics["importance_clipfrac"].value < 1


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)  # nothing is changed
@given(data=st.data())
def test_splits_and_order_change_nothing(samples, settings, data):
    """Prepared once, then spread over two ranks of two micro-batches in any order (empty ones included)."""
    policy, loss = TinyPolicy(), PolicyLoss(**settings)
    batch = loss.prepare(pack_samples(samples))
    whole = loss(policy.outputs(batch), batch)
    (gradient,) = torch.autograd.grad(whole.total, policy.table)

    order = data.draw(st.permutations(range(len(samples))))
    place = data.draw(st.lists(st.integers(0, 3), min_size=len(samples), max_size=len(samples)))
    parts, summed = [], torch.zeros_like(gradient)
    for k in range(4):
        part = batch.select([i for i in order if place[i] == k])
        result = loss(policy.outputs(part), part)
        parts.append(result)
        summed += torch.autograd.grad(result.total, policy.table)[0]
    assert sum(part.total.item() for part in parts) == pytest.approx(whole.total.item(), rel=1e-6, abs=1e-9)
    torch.testing.assert_close(summed, gradient, rtol=1e-6, atol=1e-9)
    merged = merge_metrics(*(part.metrics for part in parts))
    assert {name: metric.value for name, metric in merged.items()} == pytest.approx(
        {name: metric.value for name, metric in whole.metrics.items()}, rel=1e-6, abs=1e-9
    )


def test_on_policy_gradient_is_reinforce(samples):
    """At ratio 1 the gradient is that of −A·log π, and nothing is clipped."""
    policy, loss = TinyPolicy(), PolicyLoss(aggregation="token_mean")
    batch = pack_samples(samples)
    outputs = policy.outputs(batch)
    batch.token_data["trainer_logprobs"] = outputs["logprobs"].detach()
    batch = loss.prepare(batch)
    result = loss(outputs, batch)
    mask = batch.loss_mask
    reinforce = -(batch.token_data["advantages"][mask] * outputs["logprobs"][mask]).sum() / mask.sum()
    (gradient,) = torch.autograd.grad(result.total, policy.table, retain_graph=True)
    (expected,) = torch.autograd.grad(reinforce, policy.table)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)
    assert result.metrics["pg_clipfrac"].value == 0
    assert result.metrics["ppo_kl"].value == 0


def test_metrics_are_token_means(samples):
    loss = PolicyLoss(kl_coef=0.5, kl_estimator="k1", correction=ImportanceCorrection("truncate", "token", 1.2))
    batch = loss.prepare(pack_samples(samples))
    outputs = TinyPolicy().outputs(batch)
    metrics = loss(outputs, batch).metrics
    mask, data = batch.loss_mask, batch.token_data
    new, old = outputs["logprobs"].detach()[mask], data["trainer_logprobs"][mask]
    weights = (old - data["generator_logprobs"][mask]).exp()
    expected = {
        "ppo_kl": (old - new).mean(),
        "entropy": outputs["entropy"].detach()[mask].mean(),
        "kl_loss": (new - data["reference_logprobs"][mask]).mean(),
        "importance_weight": weights.clamp(max=1.2).mean(),
        "importance_clipfrac": (weights > 1.2).double().mean(),
    }
    assert {name: metrics[name].value for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-5
    )
    assert {metrics[name].count for name in expected} == {sum(LENGTHS)}
    assert metrics["pg_loss"].reducer == "sum"


def test_distances_are_shown_as_they_are(samples):
    """Trainer logprobs 50 nats above the policy's, the reference's 30 below, one token of probability 0."""
    loss = PolicyLoss(kl_coef=0.5)
    batch = loss.prepare(pack_samples(samples))
    outputs = TinyPolicy().outputs(batch)
    batch.token_data["trainer_logprobs"] = outputs["logprobs"].detach() + 50
    batch.token_data["reference_logprobs"] = outputs["logprobs"].detach() - 30
    metrics = loss(outputs, batch).metrics
    assert metrics["ppo_kl"].value == pytest.approx(50, rel=1e-5)
    assert metrics["reference_kl_k1"].value == pytest.approx(30, rel=1e-5)
    assert metrics["reference_kl"].value == pytest.approx(29, rel=1e-5)  # e^-30 + 30 - 1
    assert metrics["kl_loss"].value == 10
    assert metrics["infinite_kl"].value == 0

    never = int(batch.loss_mask.nonzero()[0])
    batch.token_data["reference_logprobs"][never] = -torch.inf
    metrics = loss(outputs, batch).metrics
    assert metrics["infinite_kl"].value == pytest.approx(1 / sum(LENGTHS))
    assert metrics["reference_kl"].value == pytest.approx(29, rel=1e-5)
    assert metrics["reference_kl"].count == sum(LENGTHS) - 1


def test_mismatch_is_measured_where_the_generator_is_old(samples):
    loss = PolicyLoss(old_logprobs="generator_logprobs")
    batch = loss.prepare(pack_samples(samples))
    outputs = TinyPolicy().outputs(batch)
    difference = (outputs["logprobs"] - batch.token_data["generator_logprobs"]).abs()[batch.loss_mask].mean().item()
    assert loss(outputs, batch).metrics["mismatch/logprob_diff_mean"].value == pytest.approx(difference)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, {"logprobs", "entropy"}),
        ({"log_entropy": False}, {"logprobs"}),
        ({"log_entropy": False, "entropy_coef": 0.01}, {"logprobs", "entropy"}),
        ({"log_entropy": False, "kl_estimator": "full"}, {"logprobs"}),
        ({"log_entropy": False, "kl_estimator": "full", "kl_coef": 0.1}, {"logprobs", "logprobs_at"}),
    ],
)
def test_asks_only_for_what_it_reads(settings, names):
    request = PolicyLoss(temperature=0.7, **settings).needs
    assert (request.names, request.temperature) == (names, 0.7)


@pytest.mark.parametrize("mode", get_args(AggregationMode))
def test_only_a_mean_over_prompts_keeps_a_group_together(mode):
    """Each half of a group divides by its own tokens: the sum over halves is not the group's mean."""
    loss = PolicyLoss(aggregation=mode, constant_length=8)
    assert loss.unit == ("group" if mode == "prompt_mean" else "sequence")


def test_values_outside_the_mask_do_not_matter(samples):
    policy, loss = TinyPolicy(), PolicyLoss(kl_coef=0.2, entropy_coef=0.1)
    batch = loss.prepare(pack_samples(samples))
    outputs = policy.outputs(batch)
    expected = loss(outputs, batch)
    mask = batch.loss_mask
    for values in (*outputs.values(), batch.token_data["trainer_logprobs"], batch.token_data["reference_logprobs"]):
        values.data[~mask] = torch.nan
    result = loss(outputs, batch)
    assert result.total.item() == expected.total.item()
    assert result.metrics == expected.metrics


def test_prepare_leaves_its_argument_alone(samples):
    batch = pack_samples(samples)
    names = set(batch.token_data)
    prepared = PolicyLoss().prepare(batch)
    assert set(batch.token_data) == names
    assert set(prepared.token_data) == names | {"loss_weight"}


def test_an_empty_mini_batch():
    policy, loss = TinyPolicy(), PolicyLoss(correction=ImportanceCorrection("mask", "token", 2.0))
    batch = loss.prepare(pack_samples([]))
    result = loss(policy.outputs(batch), batch)
    result.total.backward()
    assert result.total.item() == 0
    assert policy.table.grad.abs().sum() == 0


@pytest.mark.parametrize("name", ["trainer_logprobs", "reference_logprobs", "generator_logprobs", "advantages"])
def test_missing_arrays_are_named(samples, name):
    batch = pack_samples(samples)
    del batch.token_data[name]
    loss = PolicyLoss(kl_coef=0.1, correction=ImportanceCorrection("mask", "token", 2.0))
    with pytest.raises(FlowError, match=f"reads {name}, which not every sample"):
        loss.prepare(batch)


def test_travels_to_other_processes():
    loss = PolicyLoss(correction=ImportanceCorrection("mask", "token", 2.0))
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_a_kl_weighted_by_the_generator_needs_its_logprobs(samples):
    batch = pack_samples(samples)
    del batch.token_data["generator_logprobs"]
    PolicyLoss(kl_coef=0.1).prepare(batch)
    with pytest.raises(FlowError, match="reads generator_logprobs"):
        PolicyLoss(kl_coef=0.1, kl_weight="generator_ratio").prepare(batch)


def test_a_whole_kl_names_what_it_reads(samples):
    loss = PolicyLoss(kl_coef=0.1, kl_estimator="full", reference="anchor")
    assert loss.needs.arguments == {"ids": "anchor_topk_ids"}
    with pytest.raises(FlowError, match="reads anchor_topk_ids, anchor_topk_logprobs"):
        loss.prepare(pack_samples(samples))


def test_weights_of_cispo_reach_both_bounds(samples):
    loss = PolicyLoss(**SETTINGS["clipped weights"])
    batch = loss.prepare(pack_samples(samples))
    outputs = TinyPolicy().outputs(batch)
    ratio = (outputs["logprobs"].detach() - batch.token_data["trainer_logprobs"]).exp()[batch.loss_mask]
    assert (ratio > 1.3).any()
    assert (ratio < 0.9).any()
    clipped = ((ratio > 1.3) | (ratio < 0.9)).double().mean().item()
    assert loss(outputs, batch).metrics["pg_clipfrac"].value == pytest.approx(clipped)
