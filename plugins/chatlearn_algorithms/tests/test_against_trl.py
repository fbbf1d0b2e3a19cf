"""TRL's own losses on the same tensors: value and gradient. A stand-in gives the logprobs in place of a model."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from chatlearn_algorithms.dpo import DPOLoss
from chatlearn_algorithms.ipo import IPOLoss
from chatlearn_algorithms.kto import POINT, KTOLoss
from chatlearn_algorithms.orpo import ORPOLoss
from chatlearn_algorithms.pair_loss import PairLoss
from chatlearn_algorithms.reward_model import RewardModelLoss
from chatlearn_algorithms.simpo import SimPOLoss
from chatlearn_core.types import TrainBatch

pytestmark = pytest.mark.slow  # importing TRL takes most of it


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    """Not at the top: collecting tests must not import it."""
    pytest.importorskip("trl", reason="TRL is not installed (requirements/dev.txt)")


PAIRS = ([(1.0, 4), (0.0, 2)], [(1.0, 1), (0.0, 3)], [(1.0, 5), (0.0, 5)])
LENGTH = 5
TOLERANCE = 1e-5


class Accelerator:
    """One process."""

    device = torch.device("cpu")

    @staticmethod
    def gather_for_metrics(values: Tensor) -> Tensor:
        return values

    gather = gather_for_metrics


def rows(values: Tensor, batch: TrainBatch, order: list[int]) -> Tensor:
    """[len(order), LENGTH] the completions' values, right-padded with zeros."""
    bounds = batch.cu_seqlens.tolist()
    padded = values.new_zeros(len(order), LENGTH)
    filled = []
    for row, index in enumerate(order):
        part = slice(bounds[index], bounds[index + 1])
        own = values[part][batch.loss_mask[part]]
        filled.append(torch.cat([own, padded[row, len(own) :]]))
    return torch.stack(filled)


def trainer(**settings: Any) -> SimpleNamespace:
    """What TRL's methods read of their trainer."""
    common: dict[str, Any] = {
        "model": SimpleNamespace(training=True),
        "accelerator": Accelerator(),
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "label_smoothing": 0.0,
        "loss_weights": [1.0],
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "use_weighting": False,
        "alpha": 0.0,
    }
    return SimpleNamespace(**(common | settings))


def model(logprobs: Tensor) -> Any:
    def forward(**arguments: Any) -> SimpleNamespace:
        zeros = torch.zeros_like(logprobs).detach()
        return SimpleNamespace(log_probs=logprobs, entropy=zeros, logits=logprobs, mean_logits=zeros, is_top1=zeros > 0)

    return forward


def inputs(batch: TrainBatch, order: list[int]) -> dict[str, Tensor]:
    """Token ids with a first token that no completion has."""
    mask = rows(batch.loss_mask.double(), batch, order)
    mask = torch.cat([mask.new_zeros(len(order), 1), mask], 1).long()
    return {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}


CHOSEN, REJECTED = [0, 2, 4], [1, 3, 5]


def trl_dpo(batch: TrainBatch, logprobs: Tensor, **settings: Any) -> Tensor:
    order = CHOSEN + REJECTED
    reference = rows(batch.token_data["reference_logprobs"], batch, order).sum(-1)
    given = inputs(batch, order) | {"ref_chosen_logps": reference[:3], "ref_rejected_logps": reference[3:]}
    from trl import DPOTrainer

    return DPOTrainer._compute_loss(trainer(**settings), model(rows(logprobs, batch, order)), given, False)


def trl_means(batch: TrainBatch, logprobs: Tensor, order: list[int]) -> Tensor:
    counts = rows(batch.loss_mask.double(), batch, order).sum(-1)
    return rows(logprobs, batch, order).sum(-1) / counts


def trl_orpo(batch: TrainBatch, logprobs: Tensor) -> Tensor:
    """The odds ratio term of TRL, and the likelihood of the paper: TRL's covers the prompt's tokens, too."""
    from trl.experimental.orpo import ORPOTrainer

    chosen, rejected = trl_means(batch, logprobs, CHOSEN), trl_means(batch, logprobs, REJECTED)
    losses, *_ = ORPOTrainer.odds_ratio_loss(trainer(beta=0.3), chosen, rejected)
    return -chosen.mean() - losses.mean()


def trl_simpo(batch: TrainBatch, logprobs: Tensor) -> Tensor:
    from trl.experimental.cpo import CPOTrainer

    own = trainer(beta=2.0, loss_type="simpo", simpo_gamma=0.6)
    chosen, rejected = trl_means(batch, logprobs, CHOSEN), trl_means(batch, logprobs, REJECTED)
    return CPOTrainer.cpo_loss(own, chosen, rejected)[0].mean()


@pytest.mark.parametrize(
    ("loss", "theirs"),
    [
        (DPOLoss(beta=0.3), lambda b, x: trl_dpo(b, x, beta=0.3, loss_types=["sigmoid"])),
        (IPOLoss(beta=0.3, token_means=True), lambda b, x: trl_dpo(b, x, beta=0.3, loss_types=["ipo"])),
        (ORPOLoss(odds_ratio_coef=0.3), trl_orpo),
        (SimPOLoss(beta=2.0, gamma=0.6), trl_simpo),
    ],
    ids=["dpo", "ipo", "orpo", "simpo"],
)
def test_pair_losses(loss: PairLoss, theirs: Any, make_preferences: Any) -> None:
    batch = make_preferences(*PAIRS)
    ours, expected = (batch.token_data["logprobs"].clone().requires_grad_() for _ in range(2))
    found, wanted = loss({"logprobs": ours}, loss.prepare(batch)).total, theirs(batch, expected)
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=TOLERANCE)
    found.backward()
    wanted.backward()
    assert expected.grad.abs().max() > 0.01
    torch.testing.assert_close(ours.grad, expected.grad, rtol=0, atol=TOLERANCE)


def test_kto(make_preferences: Any) -> None:
    from trl import KTOTrainer

    batch = make_preferences(*PAIRS)
    order = list(range(6))
    labels = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    ours, theirs = (batch.token_data["logprobs"].clone().requires_grad_() for _ in range(2))
    kl = torch.tensor([0.5, -0.2, 1.1], dtype=torch.float64)
    given = inputs(batch, order) | {
        "label": labels.bool(),
        "ref_logps": rows(batch.token_data["reference_logprobs"], batch, order).sum(-1),
        "ref_KL_logps": torch.zeros_like(kl),
    }
    own = trainer(
        beta=0.3,
        loss_type="kto",
        calculate_KL=True,
        desirable_weight=1.2,
        undesirable_weight=0.8,
        _compute_kl_logps=lambda *_: kl,
    )
    wanted = KTOTrainer._compute_loss(own, model(rows(theirs, batch, order)), given, False)
    batch.sequence_data |= {"label": labels, POINT: torch.full((6,), float(kl.mean()), dtype=torch.float64)}
    loss = KTOLoss(0.3, 1.2, 0.8)
    found = loss({"logprobs": ours}, loss.prepare(batch)).total
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
    found.backward()
    wanted.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=TOLERANCE)


def test_reward_model(make_preferences: Any) -> None:
    from trl import RewardTrainer

    batch = make_preferences(*PAIRS)
    order = CHOSEN + REJECTED
    scores = torch.tensor([0.3, -1.0, 1.4, 0.9, -0.2, 0.1], dtype=torch.float64)
    ours, theirs = (scores.clone().requires_grad_() for _ in range(2))
    own = trainer(args=SimpleNamespace(center_rewards_coefficient=0.05))
    given = {"attention_mask": torch.ones(6, 2), "margin": torch.full((3,), 0.4, dtype=torch.float64)}
    wanted = RewardTrainer.compute_loss(own, model(theirs[order].unsqueeze(-1)), given)
    loss = RewardModelLoss(margin_coef=0.4, centring_coef=0.05)
    found = loss({"scores": ours}, loss.prepare(batch)).total
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
    found.backward()
    wanted.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=TOLERANCE)
