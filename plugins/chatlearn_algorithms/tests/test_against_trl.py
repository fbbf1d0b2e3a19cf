"""TRL's own losses on the same tensors: value and gradient. A stand-in gives the logprobs in place of a model."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from chatlearn_algorithms.cispo import ClippedWeight
from chatlearn_algorithms.dpo import DPOLoss
from chatlearn_algorithms.gspo import SequenceClip
from chatlearn_algorithms.ipo import IPOLoss
from chatlearn_algorithms.kto import POINT, KTOLoss
from chatlearn_algorithms.objectives import Clip
from chatlearn_algorithms.orpo import ORPOLoss
from chatlearn_algorithms.pair_loss import PairLoss
from chatlearn_algorithms.policy_loss import PolicyLoss
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
    num_processes = 1
    sync_gradients = True

    @staticmethod
    def gather_for_metrics(values: Tensor) -> Tensor:
        return values

    @staticmethod
    def reduce(values: Tensor, reduction: str) -> Tensor:
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


VOCABULARY = 7


def test_whole_orpo(make_preferences: Any) -> None:
    """TRL's whole loss, from logits. Its likelihood is a mean over all tokens after the first of all chosen sequences:
    ours, where prompts have one token and chosen completions have equal lengths.
    """
    from trl.experimental.orpo import ORPOTrainer

    batch = make_preferences([(1.0, 4), (0.0, 2)], [(1.0, 4), (0.0, 3)], [(1.0, 4), (0.0, 5)], num_prompt=1)
    order = CHOSEN + REJECTED
    drawn = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCABULARY, (6, LENGTH + 1), generator=drawn)
    lengths = [batch.lengths[index] for index in order]
    logits = torch.randn(6, LENGTH + 1, VOCABULARY, generator=drawn, dtype=torch.float64)
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))

    there = torch.arange(LENGTH + 1) < torch.tensor(lengths)[:, None]
    labels = torch.where(there, ids, -100)
    labels[:, 0] = -100
    sides = {"chosen": slice(0, 3), "rejected": slice(3, 6)}
    given = {f"{side}_input_ids": ids[rows] for side, rows in sides.items()}
    given |= {f"{side}_attention_mask": there[rows].long() for side, rows in sides.items()}
    given |= {f"{side}_labels": labels[rows] for side, rows in sides.items()}
    own = ORPOTrainer.__new__(ORPOTrainer)
    vars(own).update(vars(trainer(beta=0.3, is_encoder_decoder=False, padding_value=0)))
    wanted, _ = own.get_batch_loss_metrics(lambda *_, **__: SimpleNamespace(logits=theirs), given)

    of_tokens = ours[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    packed = [of_tokens.new_zeros(0)] * 6
    for row, index in enumerate(order):
        packed[index] = torch.cat([of_tokens.new_zeros(1), of_tokens[row, : lengths[row] - 1]])
    loss = ORPOLoss(odds_ratio_coef=0.3)
    found = loss({"logprobs": torch.cat(packed)}, loss.prepare(batch)).total
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=TOLERANCE)
    found.backward()
    wanted.backward()
    assert theirs.grad.abs().max() > 0.01
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=TOLERANCE)


TOKEN_CLIP = {"objective": Clip(0.1, 0.3), "kl_weight": "ratio"}
SEQUENCE_CLIP = {"objective": SequenceClip(0.05, 0.1)}


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(
    ("loss_type", "theirs", "ours"),
    [
        ("grpo", {}, TOKEN_CLIP),
        ("dr_grpo", {}, TOKEN_CLIP | {"aggregation": "seq_mean_token_sum_norm", "constant_length": 16}),
        ("bnpo", {}, TOKEN_CLIP | {"aggregation": "token_mean"}),
        ("dapo", {}, TOKEN_CLIP | {"aggregation": "token_mean"}),
        ("dapo", {"delta": 1.4}, TOKEN_CLIP | {"objective": Clip(0.1, 0.3, 1.4), "aggregation": "token_mean"}),
        (
            "cispo",
            {"epsilon_high": 1.3},
            {"objective": ClippedWeight(1.0, 0.3), "kl_weight": "ratio", "aggregation": "token_mean"},
        ),
        ("grpo", {"level": "sequence"}, SEQUENCE_CLIP),
        ("dapo", {"level": "sequence"}, SEQUENCE_CLIP | {"aggregation": "token_mean"}),
    ],
    ids=["grpo", "dr_grpo", "bnpo", "dapo", "delta", "cispo", "sequence", "sequence token mean"],
)
def test_grpo(make_preferences: Any, loss_type: str, theirs: Any, ours: Any, beta: float) -> None:
    """TRL weights the KL by the ratio of its level; ours by the token's, so sequence level has a plain KL."""
    from trl import GRPOTrainer

    batch = make_preferences(*PAIRS)
    order = list(range(6))
    drawn = torch.Generator().manual_seed(3)
    noise = 0.4 * torch.randn(batch.num_tokens, generator=drawn, dtype=torch.float64)
    batch.token_data["trainer_logprobs"] = batch.token_data["logprobs"] + noise
    advantages = torch.tensor([1.2, -0.7, 0.4, -1.5, 0.6, -0.9], dtype=torch.float64)
    batch.token_data["advantages"] = advantages[batch.sequence_index]
    found, expected = (batch.token_data["logprobs"].clone().requires_grad_() for _ in range(2))
    mask = rows(batch.loss_mask.double(), batch, order)
    sequence = theirs.get("level") == "sequence"
    low, high = (0.05, 0.1) if sequence else (0.1, 0.3)

    def of_policy(*_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return rows(expected, batch, order), torch.zeros_like(mask), None

    own = trainer(
        _get_per_token_logps_and_entropies=of_policy,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(delta=theirs.get("delta"), use_bias_correction_kl=not sequence, steps_per_generation=1),
        beta=beta,
        current_gradient_accumulation_steps=1,
        epsilon_high=theirs.get("epsilon_high", high),
        epsilon_low=low,
        importance_sampling_level=theirs.get("level", "token"),
        loss_type=loss_type,
        max_completion_length=16,
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
    )
    ones = torch.ones_like(mask).long()
    given = {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": ones,
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": rows(batch.token_data["trainer_logprobs"], batch, order),
        "ref_per_token_logps": rows(batch.token_data["reference_logprobs"], batch, order),
        "num_items_in_batch": mask.sum(),
    }
    wanted = GRPOTrainer._compute_loss(own, own.model, given)
    loss = PolicyLoss(kl_coef=beta, kl_clamp="none", log_entropy=False, **ours)
    result = loss({"logprobs": found}, loss.prepare(batch))
    torch.testing.assert_close(result.total.double(), wanted.double(), rtol=0, atol=TOLERANCE)
    result.total.backward()
    wanted.backward()
    assert expected.grad.abs().max() > 0.01
    torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=TOLERANCE)
    assert result.metrics["pg_clipfrac"].total >= 2
    if "delta" in theirs:
        assert result.metrics["pg_clipfrac_lower"].total >= 1
