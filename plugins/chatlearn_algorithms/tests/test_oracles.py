"""Values that other projects' own functions gave, with their inputs: ``oracles.json``.

Each case names the project, the commit and the function, and the formula in words. A case that no variant here computes
is under ``DIFFERS``, with what this project computes instead; docs/algorithms.md explains each.
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

from chatlearn_algorithms.group_advantages import group_advantages
from chatlearn_algorithms.grpo_options import GRPOOptions
from chatlearn_algorithms.objectives import Clip
from chatlearn_algorithms.policy_loss import ImportanceCorrection, PolicyLoss
from chatlearn_core.batching.partition import partition
from chatlearn_core.metrics.mismatch import mismatch_metrics
from chatlearn_core.types import TrainBatch, cumulative_lengths
from chatlearn_losses import aggregation_weights, clipped_policy_loss, importance_weights, kl_estimate

Case = dict[str, Any]
CASES: list[Case] = json.loads(Path(__file__).with_name("oracles.json").read_text())
DIFFERS = ("entropy bonus as a token mean", "GRPO, absolute final clip", "token_mean_legacy")

NAMES = {
    "old_log_probs": "trainer_logprobs",
    "rollout_log_probs": "generator_logprobs",
    "ref_log_probs": "reference_logprobs",
    "advantages": "advantages",
}


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch_of(inputs: Case) -> TrainBatch:
    """The rows of a padded batch as packed sequences, padding included: it is masked."""
    mask = tensor(inputs["mask"])
    num_rows, length = mask.shape
    return TrainBatch(
        sample_ids=tuple(f"s{i}" for i in range(num_rows)),
        token_ids=torch.arange(mask.numel()),
        cu_seqlens=cumulative_lengths([length] * num_rows),
        loss_mask=mask.bool().reshape(-1),
        unit_index=torch.arange(num_rows),
        group_index=torch.arange(num_rows),
        token_data={ours: tensor(inputs[theirs]).reshape(-1) for theirs, ours in NAMES.items() if theirs in inputs},
    )


def close(found: Tensor, expected: Any, case: Case) -> None:
    wanted = tensor(expected)
    torch.testing.assert_close(found.double().reshape(wanted.shape), wanted, rtol=0, atol=case["tolerance"])


def check_loss(case: Case, **settings: Any) -> None:
    """Value and gradient of the policy loss."""
    batch = batch_of(case["inputs"])
    loss = PolicyLoss(log_entropy=False, **settings)
    logprobs = tensor(case["inputs"]["log_probs"]).reshape(-1).requires_grad_()
    prepared = loss.prepare(batch)
    total = loss({"logprobs": logprobs}, prepared).total
    (gradient,) = torch.autograd.grad(total, logprobs)
    close(total, case["expected"]["value"], case)
    close(gradient, case["expected"]["grad_log_probs"], case)


def nemo(case: Case, **settings: Any) -> None:
    """NeMo-RL averages over tokens."""
    check_loss(case, aggregation="token_mean", **settings)


def corrected(mode: Any, level: Any, threshold: float, minimum: float | None) -> dict[str, Any]:
    return {"correction": ImportanceCorrection(mode, level, threshold, minimum)}


def dual_clip(case: Case) -> None:
    clip, inputs = case["settings"]["clip"], case["inputs"]
    loss = clipped_policy_loss(
        tensor(inputs["ratios"]),
        tensor(inputs["advantages"]),
        clip_low=clip,
        clip_high=clip,
        dual_clip=case["settings"]["c"],
    )
    close(loss.per_token, case["expected"]["value"], case)


def trl_kl(case: Case) -> None:
    settings = case["settings"]
    check_loss(
        case,
        objective=Clip(settings["clip_low"], settings["clip_high"]),
        kl_coef=settings["beta"],
        kl_weight="ratio",
        kl_clamp="none",
    )


def nemo_kl(case: Case) -> None:
    weight = {"on-policy approximation": "generator_ratio", "k3": "score"}[case["quantity"]]
    nemo(case, kl_coef=case["settings"]["beta"], kl_weight=weight, kl_clamp="all")


def weighted_kl(case: Case) -> None:
    if case["source"]["repo"] == "huggingface/trl":
        trl_kl(case)
    else:
        nemo_kl(case)


def estimate(clamp: Any) -> Callable[[Case], None]:
    def check(case: Case) -> None:
        inputs = case["inputs"]
        values = kl_estimate(
            tensor(inputs["log_probs"]), tensor(inputs["ref_log_probs"]), case["quantity"], clamp=clamp
        )
        close(values, case["expected"]["value"], case)

    return check


def group_normalisation(case: Case) -> None:
    std = "sample" if "unbiased=True" in case["quantity"] else "population"
    rewards, index = np.array(case["inputs"]["rewards"]), np.array(case["inputs"]["index"])
    found = np.concatenate(
        [group_advantages(rewards[index == group], std, case["settings"]["eps"]) for group in np.unique(index)]
    )
    close(torch.from_numpy(found), case["expected"]["value"], case)


def off_policy_metrics(case: Case) -> None:
    """KL from what sampled; perplexities and chi-square are not measured here."""
    batch = batch_of(case["inputs"])
    data = batch.token_data
    found = mismatch_metrics(data["trainer_logprobs"], data["generator_logprobs"], batch.loss_mask)
    assert found["mismatch/kl_k1"].value == pytest.approx(case["expected"]["kl"], abs=case["tolerance"])
    assert found["mismatch/kl"].value == pytest.approx(case["expected"]["k3_kl"], abs=case["tolerance"])


def icepop(case: Case) -> None:
    minimum, threshold = case["settings"]["bounds"]
    if "in the loss" in case["quantity"]:
        nemo(case, **corrected("mask", "token", threshold, minimum))
        return
    batch = batch_of(case["inputs"])
    data = batch.token_data
    found = importance_weights(
        data["trainer_logprobs"],
        data["generator_logprobs"],
        batch,
        mode="mask",
        level=case["settings"]["level"],
        threshold=threshold,
        minimum=minimum,
    )
    close(found.weights, case["expected"]["value"], case)


def truncated(case: Case) -> None:
    minimum, threshold = case["settings"]["bounds"]
    nemo(case, **corrected("truncate", "token", threshold, minimum))


def cap_below_one(case: Case) -> None:
    nemo(case, **corrected("truncate", "token", case["settings"]["cap"], None))


def masked_sequences(case: Case) -> None:
    minimum, threshold = case["settings"]["bounds"]
    nemo(case, **corrected("mask_sequences", "sequence_geometric", threshold, minimum))


def openrlhf_correction(case: Case) -> None:
    settings = case["settings"]
    minimum, threshold = settings["bounds"]
    mode, level = {
        "tis": ("truncate", "token"),
        "icepop": ("mask", "token"),
        "seq-mask-tis": ("mask_sequences", "sequence_geometric"),
    }[case["quantity"]]
    check_loss(
        case,
        objective=Clip(settings["clip_low"], settings["clip_high"]),
        aggregation="token_mean",
        **corrected(mode, level, threshold, minimum),
    )


def kept_sequences(case: Case) -> None:
    """Sequences are kept by the ratio's product or geometric mean; verl bounds the reciprocal."""
    low, high = case["settings"]["bounds"]
    if case["source"]["repo"] == "verl-project/verl":
        low, high = 1 / high, 1 / low
    batch = batch_of(case["inputs"])
    found = importance_weights(
        batch.token_data["trainer_logprobs"],
        batch.token_data["generator_logprobs"],
        batch,
        mode="mask_sequences",
        level="sequence" if case["quantity"] == "product" else "sequence_geometric",
        threshold=high,
        minimum=low,
    )
    kept = (batch.loss_mask & ~found.limited).double()
    expected = tensor(case["expected"]["value"]) * tensor(case["inputs"]["mask"])
    close(kept, expected.tolist(), case)
    assert torch.equal(found.weights > 0, kept > 0)


def ratio_rejection(case: Case) -> None:
    """What is kept and its weights; of a sequence, the geometric mean at each of its tokens."""
    settings = case["settings"]
    batch = batch_of(case["inputs"])
    found = importance_weights(
        batch.token_data["trainer_logprobs"],
        batch.token_data["generator_logprobs"],
        batch,
        mode="mask",
        level="token" if settings["level"] == "token" else "sequence_geometric",
        threshold=settings["upper"],
        minimum=settings["lower"],
    )
    close((batch.loss_mask & ~found.limited).double(), case["expected"]["mask"], case)
    close(found.weights, case["expected"]["weights"], case)


def unclipped_ratio(case: Case) -> None:
    """A sum over tokens: a mean over sequences of sums, times their number."""
    inputs = case["inputs"]
    batch, num_sequences = batch_of(inputs), len(inputs["mask"])
    loss = PolicyLoss(objective=Clip(1.0, float("inf")), aggregation="seq_mean_token_sum", log_entropy=False)
    logprobs = tensor(inputs["log_probs"]).reshape(-1).requires_grad_()
    total = num_sequences * loss({"logprobs": logprobs}, loss.prepare(batch)).total
    (gradient,) = torch.autograd.grad(total, logprobs)
    close(total, case["expected"]["value"], case)
    close(gradient, case["expected"]["grad_log_probs"], case)


def balanced_bins(case: Case) -> None:
    """Any split is as good whose fullest bin holds no more; bins of equal counts are not asked for here."""
    lengths = case["inputs"]["lengths"]
    bins = partition(lengths, case["settings"]["k"])
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert max(sum(lengths[index] for index in members) for members in bins) <= max(case["expected"]["sums"])


CHECKS: dict[str, Callable[[Case], None]] = {
    "dual clip": dual_clip,
    "KL weighted by importance": weighted_kl,
    "KL with its sampling gradient": nemo_kl,
    "KL with output clamp": estimate("all"),
    "KL without clamps": estimate("none"),
    "KL clamped to +-10": estimate("all"),
    "group normalisation": group_normalisation,
    "off-policy metrics": off_policy_metrics,
    "IcePop, two bounds": icepop,
    "TIS with a lower bound": truncated,
    "TIS cap below 1": cap_below_one,
    "seq-mask-TIS": masked_sequences,
    "vLLM correction": openrlhf_correction,
    "sequence rejection with free bounds": kept_sequences,
    "rejection by ratio bounds": kept_sequences,
    "rejection sampling": ratio_rejection,
    "importance sampling loss": unclipped_ratio,
    "partition into bins of equal size": balanced_bins,
}


def test_every_case_is_checked_or_known_to_differ():
    assert {case["algorithm"] for case in CASES} == {*CHECKS, *DIFFERS}


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["algorithm"] in CHECKS], ids=lambda case: case["id"].replace(" ", "_")
)
def test_values_of_other_projects(case):
    CHECKS[case["algorithm"]](case)


def only(algorithm: str) -> Case:
    (case,) = [case for case in CASES if case["algorithm"] == algorithm]
    return case


def test_the_dual_clip_is_relative_to_the_advantage():
    """The other project's cap is a number; here, as in the paper, it is c times |A|. Its first token has A = -2."""
    case = only("GRPO, absolute final clip")
    settings, inputs = case["settings"], case["inputs"]
    ratio = tensor(inputs["log_ratio"]).clamp(max=settings["diff_clip"]).exp()
    found = clipped_policy_loss(
        ratio,
        tensor(inputs["advantages"]),
        clip_low=settings["clip"],
        clip_high=settings["clip"],
        dual_clip=settings["final_clip"],
    )
    assert case["expected"]["value"] == [3.0, 3.0, -1.2]
    assert found.per_token.tolist() == pytest.approx([6.0, 3.0, -1.2])


def test_the_token_mean_does_not_depend_on_micro_batches():
    """The other project's legacy mode averages the means of micro-batches of two sequences, and here the mean is
    over all tokens.
    """
    case = only("token_mean_legacy")
    losses, mask = tensor(case["inputs"]["loss"]), tensor(case["inputs"]["mask"])
    batch = batch_of(case["inputs"])
    found = (aggregation_weights(batch, "token_mean") * losses.reshape(-1)).sum()
    assert found.item() == pytest.approx(((losses * mask).sum() / mask.sum()).item())
    size = case["settings"]["micro_batch_size"]
    parts = zip(losses.split(size), mask.split(size), strict=True)
    means = [(part * kept).sum() / kept.sum() for part, kept in parts]
    assert torch.stack(means).mean().item() == pytest.approx(case["expected"]["value"])
    assert found.item() != pytest.approx(case["expected"]["value"])


def test_the_entropy_bonus_is_weighed_as_the_loss_is():
    """The other project's is a mean over tokens whatever the aggregation: the two agree where that is token_mean."""
    case = only("entropy bonus as a token mean")
    coef, inputs = case["settings"]["entropy_coef"], case["inputs"]
    logprobs, entropies = tensor(inputs["log_probs"]).reshape(-1), tensor(inputs["entropies"]).reshape(-1)

    def bonus(aggregation: Any) -> float:
        totals = []
        for entropy_coef in (coef, 0.0):
            loss = PolicyLoss(aggregation=aggregation, entropy_coef=entropy_coef)
            batch = loss.prepare(batch_of(inputs))
            totals.append(loss({"logprobs": logprobs, "entropy": entropies}, batch).total.item())
        return totals[0] - totals[1]

    mask = tensor(inputs["mask"])
    over_tokens = (entropies * mask.reshape(-1)).sum() / mask.sum()
    over_sequences = ((entropies.reshape(mask.shape) * mask).sum(-1) / mask.sum(-1).clamp(min=1))[mask.any(-1)].mean()
    assert bonus("token_mean") == pytest.approx(-coef * over_tokens.item(), abs=1e-6)
    assert bonus("seq_mean_token_mean") == pytest.approx(-coef * over_sequences.item(), abs=1e-6)
    policy = PolicyLoss(objective=Clip(high=0.28))
    batch = policy.prepare(batch_of(inputs))
    value = policy({"logprobs": logprobs, "entropy": entropies}, batch).total.item() + bonus("token_mean")
    assert value == pytest.approx(case["expected"]["value"], abs=1e-5)


def test_the_options_reach_what_is_compared():
    """The settings of these checks are options by the same names."""
    GRPOOptions(
        kl_coef=0.1,
        kl_weight="ratio",
        kl_clamp="none",
        importance_correction="mask_sequences",
        importance_level="sequence_geometric",
        importance_threshold=1.5,
        importance_min=0.8,
    )
