"""Values that other projects' own functions gave for preference losses: ``preference_oracles.json``.

A case that no option here computes is under ``ELSEWHERE``; docs/algorithms.md names them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chatlearn_algorithms.dpo import DPOLoss
from chatlearn_core.types import TrainBatch, cumulative_lengths
from chatlearn_losses import (
    bradley_terry_loss,
    dpo_loss,
    generalised_jsd,
    ipo_loss,
    kto_loss,
    log_odds,
    simpo_loss,
)

Case = dict[str, Any]
CASES: list[Case] = json.loads(Path(__file__).with_name("preference_oracles.json").read_text())
ELSEWHERE = {
    "trl/DPO family/sppo_hard/25",
    "trl/DPO family/hinge/19",
    "trl/DPO family/nca_pair/22",
    "trl/DPO family/aot_unpaired/27",
    "trl/DPO family/apo_zero/28",
    "trl/DPO family/bco_pair/24",
    "trl/DPO f-divergence/alpha_divergence/34",
    "trl/DPO f-divergence/js_divergence/33",
    "trl/CPO/hinge/40",
    "trl/AlphaPO/alpha=.25/42",
    "prime/on-policy distillation/ref_kl/ragged",
}


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def difference(inputs: Case) -> Tensor:
    """h of summed logprobs."""
    if "h" in inputs:
        return tensor(inputs["h"])
    chosen = tensor(inputs["policy_chosen_logps"]) - tensor(inputs["reference_chosen_logps"])
    return chosen - tensor(inputs["policy_rejected_logps"]) + tensor(inputs["reference_rejected_logps"])


def packed(inputs: Case) -> TrainBatch:
    """The rows of a padded batch, padding masked; chosen and rejected take turns."""
    mask = tensor(inputs["mask"])
    num_rows, length = mask.shape
    ranks = torch.tensor([1.0, 0.0] * (num_rows // 2))
    return TrainBatch(
        sample_ids=tuple(f"s{i}" for i in range(num_rows)),
        token_ids=torch.arange(mask.numel()),
        cu_seqlens=cumulative_lengths([length] * num_rows),
        loss_mask=mask.bool().reshape(-1),
        unit_index=torch.arange(num_rows) // 2,
        group_index=torch.arange(num_rows) // 2,
        token_data={"reference_logprobs": tensor(inputs["ref_log_probs"]).reshape(-1)},
        sequence_data={"rank": ranks},
    )


def dpo(case: Case) -> Tensor:
    settings = case["settings"]
    if "log_probs" in case["inputs"]:
        assert not settings["average"]
        loss = DPOLoss(beta=settings["beta"], sft_coef=settings["sft_weight"])
        logprobs = tensor(case["inputs"]["log_probs"]).reshape(-1)
        return loss({"logprobs": logprobs}, loss.prepare(packed(case["inputs"]))).total
    smoothing = settings.get("alpha", settings.get("label_smoothing")) if case["algorithm"] == "DPO" else 0.0
    losses = dpo_loss(settings["beta"] * difference(case["inputs"]), smoothing)
    return losses if isinstance(case["expected"]["value"], list) else losses.mean()


def ipo(case: Case) -> Tensor:
    if "delta" in case["inputs"]:
        return ipo_loss(tensor(case["inputs"]["delta"]), case["settings"]["beta"])
    return ipo_loss(difference(case["inputs"]), case["settings"]["beta"]).mean()


def reward_model(case: Case) -> Tensor:
    inputs = case["inputs"]
    margin = tensor(inputs["margin"]) if "margin" in inputs else 0.0
    return bradley_terry_loss(tensor(inputs["chosen"]) - tensor(inputs["rejected"]), margin).mean()


def kto(case: Case) -> Tensor:
    inputs, settings = case["inputs"], case["settings"]
    chosen, rejected = tensor(inputs["chosen_logratios"]), tensor(inputs["rejected_logratios"])
    labels = torch.cat([torch.ones_like(chosen), torch.zeros_like(rejected)])
    losses = kto_loss(
        settings["beta"] * torch.cat([chosen, rejected]),
        settings["beta"] * inputs["kl"],
        labels,
        settings["desirable_weight"],
        settings["undesirable_weight"],
    )
    torch.testing.assert_close(losses, tensor(case["expected"]["per_sample"]), rtol=0, atol=case["tolerance"])
    return losses.mean()


def orpo(case: Case) -> Tensor:
    odds = [log_odds(tensor(case["inputs"][f"average_{side}_logps"])) for side in ("chosen", "rejected")]
    return -case["settings"]["beta"] * dpo_loss(odds[0] - odds[1])


def simpo(case: Case) -> Tensor:
    chosen, rejected = (tensor(case["inputs"][f"average_{side}_logps"]) for side in ("chosen", "rejected"))
    return simpo_loss(case["settings"]["beta"] * (chosen - rejected), case["settings"]["gamma"])


def cpo(case: Case) -> Tensor:
    """DPO against a uniform reference."""
    inputs, settings = case["inputs"], case["settings"]
    differences = tensor(inputs["chosen_logps"]) - tensor(inputs["rejected_logps"])
    return dpo_loss(settings["beta"] * differences, settings["label_smoothing"])


def jsd(case: Case) -> Tensor:
    student, teacher = (tensor(case["inputs"][f"{side}_logits"]).log_softmax(-1) for side in ("student", "teacher"))
    return generalised_jsd(student, teacher, case["settings"]["beta"]).mean()


def online_dpo(case: Case) -> Tensor:
    """All ordered pairs of a prompt weigh the same, and the prompt weighs 1 / (1 + 1e-5) there."""
    scores = tensor(case["inputs"]["scores"])
    batch = TrainBatch(
        sample_ids=("a", "b", "c"),
        token_ids=torch.arange(6),
        cu_seqlens=cumulative_lengths([2, 2, 2]),
        loss_mask=torch.tensor([False, True] * 3),
        unit_index=torch.zeros(3, dtype=torch.int64),
        group_index=torch.zeros(3, dtype=torch.int64),
        token_data={"reference_logprobs": torch.full((6,), -1.0, dtype=torch.float64)},
        sequence_data={"rank": tensor(case["inputs"]["rewards"])},
    )
    logprobs = torch.stack([torch.zeros(3, dtype=torch.float64), scores - 1], -1).reshape(-1)
    loss = DPOLoss(beta=case["settings"]["beta"])
    return loss({"logprobs": logprobs}, loss.prepare(batch)).total / (1 + 1e-5)


CHECKS: dict[str, Callable[[Case], Tensor]] = {
    "DPO": dpo,
    "DPO family": dpo,
    "IPO": ipo,
    "reward model": reward_model,
    "KTO": kto,
    "ORPO": orpo,
    "SimPO": simpo,
    "CPO": cpo,
    "distillation, generalised JSD": jsd,
    "Online DPO": online_dpo,
}


def test_every_case_is_checked_or_known_to_be_elsewhere():
    assert {case["id"] for case in CASES} >= ELSEWHERE
    assert {case["algorithm"] for case in CASES if case["id"] not in ELSEWHERE} == set(CHECKS)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["id"] not in ELSEWHERE], ids=lambda case: case["id"].replace(" ", "_")
)
def test_values_of_other_projects(case):
    found = CHECKS[case["algorithm"]](case)
    torch.testing.assert_close(found, tensor(case["expected"]["value"]), rtol=0, atol=case["tolerance"])
