from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from chatlearn_algorithms.adaptive_kl import AdaptiveKL
from chatlearn_algorithms.policy_loss import ImportanceCorrection
from chatlearn_algorithms.ppo import PPO
from chatlearn_algorithms.ppo_options import DecoupledPPOOptions, PPOOptions
from chatlearn_algorithms.value_loss import ValueLoss
from chatlearn_core.exceptions import ConfigError, FlowError
from chatlearn_core.types import Sample, TrainBatch, merge_metrics, pack_samples, scored_batch


@pytest.fixture
def make_ppo(make_context):
    def build(**options: Any) -> PPO:
        return PPO(PPOOptions(**options), make_context(reference="trainer", critic="trainer"))

    return build


@pytest.fixture
def scored(make_group) -> TrainBatch:
    """Three rollouts with values, and logprobs of policy and reference."""
    batch = scored_batch([*make_group("a", [1.0], [4]), *make_group("b", [0.0], [2]), *make_group("c", [0.5], [3])])
    generator = torch.Generator().manual_seed(7)
    for name in ("critic_values", "trainer_logprobs", "reference_logprobs"):
        batch.token_data[name] = torch.rand(batch.num_tokens, generator=generator)
    return batch


def loop_ppo(batch: TrainBatch, gamma: float, lam: float, beta: float) -> tuple[list[float], list[float]]:
    """Token rewards, then the recursion from the end (arXiv 2203.02155, 1506.02438), one sequence after the other."""
    advantages, returns = [0.0] * batch.num_tokens, [0.0] * batch.num_tokens
    policy, reference, values = (
        batch.token_data[name].tolist() for name in ("trainer_logprobs", "reference_logprobs", "critic_values")
    )
    bounds = batch.cu_seqlens.tolist()
    for index in range(batch.num_sequences):
        actions = [t for t in range(bounds[index], bounds[index + 1]) if batch.loss_mask[t]]
        following, following_value = 0.0, 0.0
        for t in reversed(actions):
            reward = -beta * (policy[t] - reference[t])
            if t == actions[-1]:
                reward += float(batch.sequence_data["reward"][index])
            following = reward + gamma * following_value - values[t] + gamma * lam * following
            following_value = values[t]
            advantages[t], returns[t] = following, following + values[t]
    return advantages, returns


@pytest.mark.parametrize(("gamma", "lam", "beta"), [(1.0, 0.95, 0.0), (0.9, 0.5, 0.2), (1.0, 1.0, 0.1)])
def test_advantages_and_returns_equal_the_loop(make_ppo, scored, gamma, lam, beta):
    advantages, returns = loop_ppo(scored, gamma, lam, beta)
    algorithm = make_ppo(gamma=gamma, gae_lambda=lam, kl_coef=beta, whiten_advantages=False)
    found = algorithm.advantages(scored, 1)
    assert found.token_data["advantages"].tolist() == pytest.approx(advantages, abs=1e-6)
    assert found.token_data["returns"].tolist() == pytest.approx(returns, abs=1e-6)

    whitened = make_ppo(gamma=gamma, gae_lambda=lam, kl_coef=beta).advantages(scored, 1)
    chosen = torch.tensor(advantages)[scored.loss_mask]
    expected = (chosen - chosen.mean()) / chosen.std()
    torch.testing.assert_close(whitened.token_data["advantages"][scored.loss_mask], expected, rtol=1e-4, atol=1e-5)
    assert whitened.token_data["returns"].tolist() == found.token_data["returns"].tolist(), "not those of the critic"
    values = scored.token_data["critic_values"][scored.loss_mask]
    target = torch.tensor(returns)[scored.loss_mask]
    explained = 1 - (target - values).var(unbiased=False) / target.var(unbiased=False)
    assert found.metrics["critic/explained_variance"].value == pytest.approx(explained.item(), abs=1e-5)
    assert algorithm.advantage_split == "batch"


def test_a_perfect_critic_leaves_no_advantage(make_ppo, scored):
    """V_t = the reward to come with γ = 1: no step is better than expected."""
    of_token = scored.sequence_data["reward"][scored.sequence_index].float()
    scored.token_data["critic_values"] = of_token
    found = make_ppo(whiten_advantages=False).advantages(scored, 1)
    assert found.token_data["advantages"].abs().max() < 1e-6
    assert found.metrics["critic/explained_variance"].value == pytest.approx(1.0, abs=1e-6)


def test_the_critic_learns_alone_at_first(make_ppo):
    algorithm = make_ppo(critic_warmup_steps=2, critic_epochs=4, critic_mini_batches=3)
    for step, roles in ((1, ["critic"]), (2, ["critic"]), (3, ["critic", "trainer"])):
        updates = algorithm.updates(step)
        assert [update.role for update in updates] == roles
        assert (updates[0].epochs, updates[0].mini_batches) == (4, 3)
    assert (updates[1].epochs, updates[1].mini_batches) == (None, None)
    assert isinstance(updates[0].loss, ValueLoss)
    assert algorithm.policy == "trainer"


def test_values_are_wanted(make_ppo, scored):
    del scored.token_data["critic_values"]
    with pytest.raises(FlowError, match=r"no critic_values: the flow must join m\.critic\.values\(samples\)"):
        make_ppo().advantages(scored, 1)


# ------------------------------------------------------------------------------------------------ the critic's loss


class TinyCritic:
    """A value for every token id."""

    def __init__(self) -> None:
        self.table = torch.randn(9, generator=torch.Generator().manual_seed(4)).double().requires_grad_()

    def outputs(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        return {"values": self.table[batch.token_ids]}


@pytest.fixture
def valued(make_group) -> list[Sample]:
    samples = [*make_group("a", [0.0] * 3, [4, 1, 3]), *make_group("bb", [0.0] * 2, [2, 5])]
    generator = np.random.default_rng(1)
    for sample in samples:
        values = TinyCritic().table.detach().numpy()[sample.token_ids]
        sample.token_data["critic_values"] = (values + generator.normal(0, 0.3, len(values))).astype(np.float32)
        sample.token_data["returns"] = generator.normal(0, 1, len(values)).astype(np.float32)
    return samples


def loop_value_loss(critic: TinyCritic, samples: list[Sample], loss: ValueLoss) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    num_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    for sample in samples:
        for t in np.flatnonzero(sample.loss_mask):
            value = critic.table[int(sample.token_ids[t])]
            old, target = (float(sample.token_data[name][t]) for name in ("critic_values", "returns"))
            error = (value - target) ** 2
            if loss.clip is not None:
                near = torch.clamp(value, old - loss.clip, old + loss.clip)
                error = torch.max(error, (near - target) ** 2)
            denominator = num_tokens if loss.aggregation == "token_mean" else len(samples) * int(sample.loss_mask.sum())
            total = total + 0.5 * error / denominator
    return total


@pytest.mark.parametrize("loss", [ValueLoss(), ValueLoss(None), ValueLoss(0.1, "seq_mean_token_mean")], ids=str)
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)  # nothing is changed
@given(data=st.data())
def test_the_critics_loss_equals_the_loop_however_it_is_split(valued, loss, data):
    critic = TinyCritic()
    batch = loss.prepare(pack_samples(valued))
    whole = loss(critic.outputs(batch), batch)
    expected = loop_value_loss(critic, valued, loss)
    assert whole.total.item() == pytest.approx(expected.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(whole.total, critic.table)
    (expected_gradient,) = torch.autograd.grad(expected, critic.table)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-8)
    order = data.draw(st.permutations(range(len(valued))))
    place = data.draw(st.lists(st.integers(0, 2), min_size=len(valued), max_size=len(valued)))
    parts, summed = [], torch.zeros_like(gradient)
    for k in range(3):
        part = batch.select([i for i in order if place[i] == k])
        result = loss(critic.outputs(part), part)
        parts.append(result.metrics)
        summed += torch.autograd.grad(result.total, critic.table)[0]
    torch.testing.assert_close(summed, gradient, rtol=1e-6, atol=1e-9)
    merged = {name: metric.value for name, metric in merge_metrics(*parts).items()}
    assert merged == pytest.approx({name: metric.value for name, metric in whole.metrics.items()}, rel=1e-6)


def test_the_critics_loss_reaches_its_clip_and_has_the_slope_of_its_value(valued):
    critic, loss = TinyCritic(), ValueLoss(0.1)
    batch = loss.prepare(pack_samples(valued))
    batch.token_data = {name: of.double() if of.is_floating_point() else of for name, of in batch.token_data.items()}
    result = loss(critic.outputs(batch), batch)
    assert result.metrics["value_clipfrac"].total >= 1
    (gradient,) = torch.autograd.grad(result.total, critic.table)
    for entry in range(9):
        sides = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                critic.table[entry] += step
                sides.append(loss(critic.outputs(batch), batch).total.item())
                critic.table[entry] -= step
        assert gradient[entry].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-4, abs=1e-7)


def test_values_outside_the_mask_do_not_matter(valued):
    critic, loss = TinyCritic(), ValueLoss()
    batch = loss.prepare(pack_samples(valued))
    outputs = critic.outputs(batch)
    expected = loss(outputs, batch).total.item()
    for values in (outputs["values"], batch.token_data["returns"], batch.token_data["critic_values"]):
        values.data[~batch.loss_mask] = torch.nan
    assert loss(outputs, batch).total.item() == expected


@pytest.mark.parametrize("name", ["returns", "critic_values"])
def test_missing_arrays_are_named(valued, name):
    batch = pack_samples(valued)
    del batch.token_data[name]
    with pytest.raises(FlowError, match=f"The value loss reads {name}, which not every sample"):
        ValueLoss().prepare(batch)
    assert pickle.loads(pickle.dumps(ValueLoss())) == ValueLoss()


# --------------------------------------------------------------------------------------------------- adaptive KL


@pytest.mark.parametrize(
    ("kl", "num_samples", "expected"),
    [
        (0.1, 10, 0.2),  # on target
        (0.105, 10, 0.2 * (1 + 0.05 * 0.1)),
        (5.0, 10, 0.2 * (1 + 0.2 * 0.1)),  # the error is cut to a fifth
        (-5.0, 10, 0.2 * (1 - 0.2 * 0.1)),
        (5.0, 1000, 0.2 * 1.2),  # ten horizons count as one
    ],
)
def test_the_controller_follows_the_kl(kl, num_samples, expected):
    controller = AdaptiveKL(0.2, 0.1, 100)
    controller.update(kl, num_samples)
    assert controller.coef == pytest.approx(expected)


def test_the_coefficient_is_state(make_ppo, scored):
    algorithm = make_ppo(kl_coef=0.2, kl_target=0.1, kl_horizon=100)
    assert algorithm.state_dict() == {"kl_coef": 0.2}
    before = algorithm.advantages(scored, 1)
    assert before.metrics["kl_coef"].value == 0.2
    algorithm.after_step(1, {"reward_kl": 9.0, "samples/trained": 50.0})
    assert algorithm.state_dict() == {"kl_coef": pytest.approx(0.2 * 1.1)}
    algorithm.after_step(2, {"samples/trained": 50.0})  # nothing was measured
    state = algorithm.state_dict()
    assert state == {"kl_coef": pytest.approx(0.2 * 1.1)}

    resumed = make_ppo(kl_coef=0.2, kl_target=0.1, kl_horizon=100)
    resumed.load_state_dict(state)
    after = resumed.advantages(scored, 3)
    assert after.metrics["kl_coef"].value == state["kl_coef"]
    assert not torch.equal(after.token_data["returns"], before.token_data["returns"])
    resumed.load_state_dict({})
    assert resumed.state_dict() == {"kl_coef": 0.2}
    assert make_ppo(kl_coef=0.2).state_dict() == {}


def test_a_kl_in_the_loss_is_followed_too(make_ppo):
    algorithm = make_ppo(kl_coef=0.2, kl_target=0.1, kl_horizon=100, kl_placement="loss", kl_estimator="k3")
    algorithm.after_step(1, {"policy/kl_loss": 0.0, "reward_kl": 9.0, "samples/trained": 100.0})
    assert algorithm.updates(2)[-1].loss.kl_coef == pytest.approx(0.2 * 0.8)


def test_a_schedule_and_a_target_exclude_each_other(make_context):
    context = replace(make_context(reference="trainer", critic="trainer"), schedules={"kl_coef": None})
    with pytest.raises(
        ConfigError, match=r"kl_target is 0\.1, which adapts kl_coef to the KL, but schedules also sets"
    ):
        PPO(PPOOptions(kl_coef=0.2, kl_target=0.1), context)


def test_decoupled_ppo_weighs_by_the_proximal_policy(make_context):
    """exp(proximal − generator), cut from above; the ratio is of the policy to the proximal one."""
    loss = PPO(DecoupledPPOOptions(), make_context(critic="trainer")).updates(1)[-1].loss
    assert loss.old_logprobs == "trainer_logprobs"
    assert loss.correction == ImportanceCorrection("truncate", "token", 5.0)
    unbounded = PPO(DecoupledPPOOptions(importance_threshold=float("inf")), make_context(critic="trainer"))
    assert unbounded.updates(1)[-1].loss.correction.threshold == float("inf")
