"""Values that other projects' own functions gave for advantages, returns, critics and objectives, with their inputs.

``policy_gradient_oracles.json`` names project, commit and function of each. What this project computes differently is
under ``DIFFERS``, with a test of its own that shows the difference; docs/algorithms.md explains each.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from chatlearn_algorithms.adaptive_kl import AdaptiveKL
from chatlearn_algorithms.cispo import ClippedWeight
from chatlearn_algorithms.gdpo import GDPO
from chatlearn_algorithms.group_advantages import group_advantages
from chatlearn_algorithms.grpo_options import GDPOOptions
from chatlearn_algorithms.gspo import SequenceClip
from chatlearn_algorithms.maxrl import mean_normalised
from chatlearn_algorithms.objectives import Clip
from chatlearn_algorithms.policy_loss import ImportanceCorrection, PolicyLoss
from chatlearn_algorithms.reinforce_options import ReinforcePPBaselineOptions
from chatlearn_algorithms.reinforce_pp import ReinforcePPBaseline
from chatlearn_algorithms.rloo import leave_one_out
from chatlearn_algorithms.scored_rewards import KLPenalty, scored_rewards
from chatlearn_algorithms.value_loss import ValueLoss
from chatlearn_core.types import TrainBatch, cumulative_lengths
from chatlearn_losses import clipped_weight_loss, discounted_returns, gae, overlong_penalty, whiten

Case = dict[str, Any]
CASES: list[Case] = json.loads(Path(__file__).with_name("policy_gradient_oracles.json").read_text(encoding="utf-8"))

DATA = {
    "old_log_probs": "trainer_logprobs",
    "rollout_log_probs": "generator_logprobs",
    "ref_log_probs": "reference_logprobs",
    "advantages": "advantages",
    "values": "critic_values",
    "returns": "returns",
    "token_level_rewards": "token_rewards",
    "token_level_scores": "token_rewards",
}


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch_of(inputs: Case, rows: str = "mask") -> TrainBatch:
    """The rows of a padded batch as packed sequences, padding included: it is masked."""
    shape = tensor(inputs[rows]).shape
    mask = tensor(inputs["mask"]) if "mask" in inputs else torch.ones(shape)
    index = inputs.get("index", list(range(shape[0])))
    return TrainBatch(
        sample_ids=tuple(f"s{i}" for i in range(shape[0])),
        token_ids=torch.arange(mask.numel()),
        cu_seqlens=cumulative_lengths([shape[1]] * shape[0]),
        loss_mask=mask.bool().reshape(-1),
        unit_index=torch.arange(shape[0]),
        group_index=torch.tensor(index),
        token_data={ours: tensor(inputs[theirs]).reshape(-1) for theirs, ours in DATA.items() if theirs in inputs},
        sequence_data={"reward": torch.zeros(shape[0], dtype=torch.float64)},
    )


def close(found: Any, expected: Any, case: Case, tolerance: float | None = None) -> None:
    wanted = tensor(expected)
    found = torch.as_tensor(found, dtype=torch.float64).reshape(wanted.shape)
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance or case["tolerance"])


def masked(values: Any, batch: TrainBatch) -> list[float]:
    """0 outside the mask, where others leave what they computed on the way."""
    return torch.where(batch.loss_mask, tensor(values).reshape(-1), 0.0).tolist()


def check_gae(case: Case) -> None:
    inputs, settings, expected = case["inputs"], case["settings"], case["expected"]
    if "cases" in settings:
        constants: Case = {name: [values] for name, values in inputs.items()} | {"mask": [[1, 1, 1]]}
        batch = batch_of(constants)
        rewards, values = tensor(inputs["rewards"]), tensor(inputs["values"])
        for returns_of, (gamma, lam) in zip(expected["returns"], [(1, 1), (0.5, 1), (1, 0.5)], strict=True):
            close(gae(rewards, values, batch, gamma=gamma, lam=lam).returns, returns_of, case)
        return
    rows = "rewards" if "rewards" in inputs else "token_level_rewards"
    batch = batch_of(inputs, rows)
    rewards = tensor(inputs[rows]).reshape(-1)
    estimate = gae(rewards, tensor(inputs["values"]).reshape(-1), batch, gamma=settings["gamma"], lam=settings["lam"])
    if "raw_advantages" in expected:
        close(estimate.advantages, masked(expected["raw_advantages"], batch), case)
        close(whiten(estimate.advantages, batch.loss_mask), masked(expected["advantages"], batch), case)
    else:
        close(estimate.advantages, expected["advantages"], case)
    close(estimate.returns, masked(expected["returns"], batch), case)


def gae_over_gaps(case: Case) -> None:
    inputs = case["inputs"]
    batch = batch_of({"mask": [inputs["mask"]]})
    rewards = tensor([0.0] * 4 + [inputs["terminal_reward"]])
    found = gae(rewards, tensor(inputs["values"]), batch, gamma=case["settings"]["gamma"], lam=case["settings"]["lam"])
    close(found.advantages, case["expected"]["advantages"], case)


def returns(case: Case) -> None:
    rows = "rewards" if "rewards" in case["inputs"] else "token_level_rewards"
    batch = batch_of(case["inputs"], rows)
    found = discounted_returns(tensor(case["inputs"][rows]).reshape(-1), batch, gamma=case["settings"]["gamma"])
    close(found, masked(case["expected"].get("returns", case["expected"].get("value")), batch), case)
    if "advantages" in case["expected"]:
        close(whiten(found, batch.loss_mask), masked(case["expected"]["advantages"], batch), case)


def by_group(case: Case, function: Callable[[Any], Any]) -> None:
    """Outcomes of groups, then at the tokens where the case has some."""
    inputs = case["inputs"]
    if "token_level_rewards" in inputs:
        batch = batch_of(inputs)
        outcomes = scored_rewards(batch).outcomes.numpy()
        groups = np.array(inputs["index"])
    else:
        batch, outcomes = None, np.array(inputs.get("scores", inputs.get("rewards")), dtype=np.float64)
        groups = np.array(inputs.get("index", inputs.get("prompts", [0] * len(outcomes))))
    found = np.zeros(len(outcomes))
    for group in np.unique(groups):
        members = groups == group
        if members.sum() > 1:  # a group of one is excluded here
            found[members] = function(outcomes[members])
    value = case["expected"]["value"]
    if batch is None:
        close(found, value, case)
        return
    of_tokens = torch.where(batch.loss_mask, torch.from_numpy(found)[batch.sequence_index], 0.0)
    close(of_tokens, masked(value, batch), case)


def leave_one_out_baseline(case: Case) -> None:
    rewards = np.array(case["inputs"]["rewards"])
    baseline = rewards.copy()
    for members in (slice(0, 3), slice(3, 6)):
        baseline[members] -= leave_one_out(rewards[members])
    close(baseline, case["expected"]["baseline"], case)


def kl_in_the_reward(case: Case) -> None:
    batch = batch_of(case["inputs"], "token_level_scores")
    penalty = KLPenalty(case["settings"]["kl_ratio"], "k1", True, "trainer_logprobs", "reference_logprobs")
    close(scored_rewards(batch, penalty=penalty).tokens, case["expected"]["value"], case)


def terminal_reward(case: Case) -> None:
    """The other project clips rewards, too; here a reward does that itself."""
    inputs, settings = case["inputs"], case["settings"]
    batch = batch_of(inputs)
    batch.sequence_data["reward"] = tensor(inputs["reward"]).clamp(*settings["reward_clip"])
    # k1 of policy 0 and reference −KL.
    batch.token_data = {"policy": torch.zeros(batch.num_tokens), "reference": -tensor(inputs["kl"]).reshape(-1)}
    found = scored_rewards(batch, penalty=KLPenalty(settings["kl_coef"], "k1", True, "policy", "reference")).tokens
    close(found, masked(case["expected"]["value"], batch), case)


def whitening(case: Case) -> None:
    batch = batch_of(case["inputs"])
    found = whiten(tensor(case["inputs"]["values"]).reshape(-1), batch.loss_mask)
    close(found, masked(case["expected"]["shifted"], batch), case)


def one_return(case: Case) -> None:
    mask = torch.tensor(case["inputs"]["mask"]).bool()
    close(whiten(tensor(case["inputs"]["rewards"]), mask), case["expected"]["value"], case)


def value_loss(case: Case) -> None:
    settings, inputs, expected = case["settings"], case["inputs"], case["expected"]
    if settings.get("loss") == "huber":
        check_huber(case)
        return
    mode = settings.get("loss_agg_mode", settings.get("aggregation", case["quantity"]))
    mode = {"token mean": "token_mean", "mean of sequence means": "seq_mean_token_mean"}.get(mode, mode)
    loss = ValueLoss(settings["cliprange_value"], mode.replace("-", "_"))
    batch = batch_of(inputs)
    values = tensor(inputs["vpreds"]).reshape(-1).requires_grad_()
    result = loss({"values": values}, loss.prepare(batch))
    close(result.total, expected["value"], case)
    if "grad_vpreds" in expected:
        (gradient,) = torch.autograd.grad(result.total, values)
        # At the very edge of the clip every slope between its two sides is one: compared where the value is not there.
        edge = (values.detach() - batch.token_data["critic_values"]).abs() - settings["cliprange_value"]
        inside = torch.where(edge.abs() > 1e-9, gradient, tensor(expected["grad_vpreds"]).reshape(-1))
        close(inside, expected["grad_vpreds"], case)
        assert result.metrics["value_clipfrac"].value == pytest.approx(expected["clipfrac"], abs=case["tolerance"])


def check_huber(case: Case) -> None:
    """There is no Huber loss here. Where no error is beyond its bound of 10, it is the squared one."""
    inputs = case["inputs"]
    values, old, target, mask = (tensor(inputs[name]) for name in ("vpreds", "values", "returns", "mask"))
    clip = case["settings"]["cliprange_value"]
    near = torch.clamp(values, old - clip, old + clip)

    def huber(error: Tensor) -> Tensor:
        return torch.where(error.abs() <= 10, error**2 / 2, 10 * (error.abs() - 5))

    theirs = torch.maximum(huber(values - target), huber(near - target))
    close((theirs * mask).sum() / mask.sum(), case["expected"]["value"], case)
    loss, batch = ValueLoss(clip), batch_of(inputs)
    ours = loss({"values": values.reshape(-1)}, loss.prepare(batch)).total.item()
    beyond = bool((((values - target).abs() > 10) & mask.bool()).any())
    assert (ours == pytest.approx(case["expected"]["value"], abs=1e-5)) is not beyond


def policy_loss(case: Case, objective: Any, aggregation: Any, *, scale: float = 1.0, **settings: Any) -> None:
    """Value and gradient. The latter only where a sequence has one advantage if the objective is a sequence's."""
    inputs, expected = case["inputs"], case["expected"]
    batch = batch_of(inputs | {"mask": inputs.get("mask", torch.ones(tensor(inputs["log_probs"]).shape).tolist())})
    loss = PolicyLoss(objective=objective, aggregation=aggregation, log_entropy=False, **settings)
    logprobs = tensor(inputs["log_probs"]).reshape(-1).requires_grad_()
    total = scale * loss({"logprobs": logprobs}, loss.prepare(batch)).total
    close(total, expected["value"], case)
    alike = all(len(set(row)) == 1 for row in inputs["advantages"])
    if "grad_log_probs" in expected and (alike or not isinstance(objective, SequenceClip)):
        (gradient,) = torch.autograd.grad(total, logprobs)
        close(gradient, expected["grad_log_probs"], case)


def cispo(case: Case) -> None:
    settings = case["settings"]
    low, high = settings.get("clip_low", 1.0), settings.get("clip_high", settings.get("bound", 0.0) - 1)
    if case["quantity"] in ("per token", "peer's constant"):
        logprobs, old, advantages = (
            tensor(case["inputs"][name]) for name in ("log_probs", "old_log_probs", "advantages")
        )
        loss = clipped_weight_loss(logprobs, (logprobs - old).exp(), advantages, clip_low=low, clip_high=high)
        if case["quantity"] == "per token":
            close(loss.per_token, case["expected"]["value"], case)
        else:  # which is written with four digits there
            close(loss.per_token.sum(), case["expected"]["value"], case, tolerance=1e-3)
    elif settings.get("aggregation") == "sum":  # a mean over sequences of sums, times their number
        old = "generator_logprobs" if "rollout" in case["quantity"] else "trainer_logprobs"
        num_sequences = int(tensor(case["inputs"]["mask"]).any(-1).sum())
        policy_loss(case, ClippedWeight(low, high), "seq_mean_token_sum", scale=num_sequences, old_logprobs=old)
    else:
        correction = ImportanceCorrection("truncate", "token", float("inf")) if "IS" in case["quantity"] else None
        mode = settings.get("aggregation", "token-mean").replace("-", "_")
        policy_loss(case, ClippedWeight(low, high), mode, correction=correction)


def gspo(case: Case) -> None:
    settings = case["settings"]
    mode = "token_mean" if "token mean" in case["quantity"] else "seq_mean_token_mean"
    correction = None
    if "IS weight" in case["quantity"]:
        correction = ImportanceCorrection("truncate", "sequence", float("inf"))
    policy_loss(case, SequenceClip(settings["clip_low"], settings["clip_high"]), mode, correction=correction)


def reinforce(case: Case) -> None:
    """Weights clipped to 1."""
    correction = None
    if "threshold" in case["settings"]:
        correction = ImportanceCorrection("truncate", "token", case["settings"]["threshold"])
    mode = case["settings"].get("aggregation", "token-mean").replace("-", "_")
    policy_loss(case, ClippedWeight(0.0, 0.0), mode, correction=correction)


def luspo(case: Case) -> None:
    policy_loss(case, Clip(case["settings"]["clip_low"], case["settings"]["clip_high"]), "seq_mean_token_sum")


def controller(case: Case) -> None:
    settings, inputs = case["settings"], case["inputs"]
    kl = AdaptiveKL(settings.get("beta", settings.get("init")), settings["target"], settings["horizon"])
    kl.update(inputs.get("kl", inputs.get("current_kl")), inputs.get("n", inputs.get("n_steps")))
    assert kl.coef == pytest.approx(case["expected"]["value"], abs=case["tolerance"])


def soft_overlong(case: Case) -> None:
    settings = case["settings"]
    found = overlong_penalty(
        torch.tensor([case["inputs"]["length"]]), longest=settings["max"], buffer=settings["cache"]
    )
    close(found, [case["expected"]["value"]], case)


CHECKS: dict[str, Callable[[Case], None]] = {
    "GAE": check_gae,
    "GAE unwhitened": check_gae,
    "GAE over gaps": gae_over_gaps,
    "discounted returns": returns,
    "REINFORCE++": returns,
    "RLOO": lambda case: by_group(case, leave_one_out),
    "MaxRL": lambda case: by_group(case, mean_normalised),
    "leave-one-out baseline and std": leave_one_out_baseline,
    "KL in the reward": kl_in_the_reward,
    "KL in the reward with terminal reward": terminal_reward,
    "masked whitening": whitening,
    "whitened returns": one_return,
    "PPO value loss": value_loss,
    "CISPO": cispo,
    "GSPO": gspo,
    "GPG loss": reinforce,
    "REINFORCE": reinforce,
    "REINFORCE with IS": reinforce,
    "LUSPO": luspo,
    "adaptive KL controller": controller,
    "soft overlong punishment (DAPO)": soft_overlong,
}
OWN_TEST = ("REINFORCE++-baseline", "GDPO")
DIFFERS = (
    "GAE without skipping",
    "batch normalisation of advantages",
    "overlong penalty, unbounded below",
    "GRPO advantage, batch scaling",
    "PPO reward shaping",
    "PPO, numerically stable ratio",
)


def test_every_case_is_checked_or_known_to_differ():
    assert {case["algorithm"] for case in CASES} == {*CHECKS, *OWN_TEST, *DIFFERS}


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["algorithm"] in CHECKS], ids=lambda case: case["id"].replace(" ", "_")
)
def test_values_of_other_projects(case):
    CHECKS[case["algorithm"]](case)


def first(algorithm: str) -> Case:
    return next(case for case in CASES if case["algorithm"] == algorithm)


def test_reinforce_pp_baseline(make_context):
    case = first("REINFORCE++-baseline")
    algorithm = ReinforcePPBaseline(ReinforcePPBaselineOptions(group_size=2), make_context())
    batch = batch_of(case["inputs"])
    close(algorithm.advantages(batch, 1).token_data["advantages"], masked(case["expected"]["value"], batch), case)


def test_gdpo(make_context):
    """The other project whitens over tokens; ε of the groups is 1e-6 and the standard deviation that of a sample."""
    case = first("GDPO")
    weights = dict(zip(("first", "second"), case["settings"]["weights"], strict=True))
    options = GDPOOptions(group_size=2, rewards=weights, advantage_std="sample", epsilon=1e-6, whiten_over="token")
    batch = batch_of(case["inputs"])
    for name, values in zip(weights, case["inputs"]["rewards"], strict=True):
        batch.sequence_data[f"reward/{name}"] = tensor(values)
    found = GDPO(options, make_context()).advantages(batch, 1).token_data["advantages"]
    close(found, masked(case["expected"]["value"], batch), case)


def test_masked_positions_take_no_part_in_gae_here():
    """Elsewhere the recursion runs through them: equal where nothing but padding is masked, as in this case."""
    case = first("GAE without skipping")
    batch, settings = batch_of(case["inputs"]), case["settings"]
    data = batch.token_data
    found = gae(data["token_rewards"], data["critic_values"], batch, gamma=settings["gamma"], lam=settings["lam"])
    theirs = tensor(case["expected"]["returns"]).reshape(-1)
    torch.testing.assert_close(found.returns[batch.loss_mask], theirs[batch.loss_mask], rtol=0, atol=1e-5)
    assert not found.returns[~batch.loss_mask].any()


def test_whitening_takes_the_unbiased_variance():
    """Elsewhere the population's standard deviation, to which ε is added."""
    case = first("batch normalisation of advantages")
    batch = batch_of(case["inputs"])
    found = whiten(batch.token_data["advantages"], batch.loss_mask)[batch.loss_mask]
    theirs = tensor(case["expected"]["value"]).reshape(-1)[batch.loss_mask]
    torch.testing.assert_close(found, theirs * (4 / 5) ** 0.5, rtol=0, atol=1e-4)


def test_the_overlong_penalty_ends_at_minus_one():
    """Elsewhere it goes on falling beyond the limit."""
    for case in (case for case in CASES if case["algorithm"] == "overlong penalty, unbounded below"):
        lengths = torch.tensor([case["inputs"]["length"]])
        found = overlong_penalty(lengths, longest=case["settings"]["max"], buffer=case["settings"]["cache"])
        assert found.item() == max(case["expected"]["value"], -1.0)


def test_the_standard_deviation_is_a_groups():
    """Elsewhere, as an option, that of the whole batch."""
    case = first("GRPO advantage, batch scaling")
    rewards = np.array(case["inputs"]["rewards"])
    centred = np.concatenate([group_advantages(rewards[part], "none") for part in (slice(0, 3), slice(3, 6))])
    close(centred / (rewards.std(ddof=1) + 1e-4), case["expected"]["value"], case)


def test_token_rewards_are_not_divided_by_the_length():
    """Elsewhere the KL of each token is; here the sum over a completion is the KL of the completion."""
    case = first("PPO reward shaping")
    inputs = case["inputs"]
    batch = batch_of({"mask": [[1, 1]], "old_log_probs": [inputs["old"]], "ref_log_probs": [inputs["ref"]]})
    batch.sequence_data["reward"] = tensor([inputs["score"]])
    penalty = KLPenalty(case["settings"]["beta"], "k1", True, "trainer_logprobs", "reference_logprobs")
    found = scored_rewards(batch, penalty=penalty).tokens
    length, at_end = len(inputs["old"]), tensor([0.0, inputs["score"]])
    close((found - at_end) / length + at_end, case["expected"]["value"], case)


def test_the_ratio_is_the_exponential():
    """Elsewhere 1 + x + x²/2, as an option."""
    case = first("PPO, numerically stable ratio")
    x = tensor(case["inputs"]["log_ratio"])
    close(1 + x + x**2 / 2, case["expected"]["value"], case)
    assert (x.exp() - tensor(case["expected"]["value"])).abs().max() < 2e-3
