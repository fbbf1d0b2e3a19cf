"""Preference losses, on one number per completion. The papers' formulas, with σ the logistic function.

Differences d are the score of the chosen completion minus that of the rejected one, of the same prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

MAX_MEAN_LOGPROB = -1e-6
"""The odds of a probability of 1 are infinite; a mean logprob this close to 0 counts as this one (ORPO)."""


def sequence_sums(values: Tensor, loss_mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """[S] sum of ``values`` [T] over each sequence's masked tokens; entries outside the mask reach neither value nor
    gradient.

    Args:
        loss_mask: [T] bool
        sequence_index: [T] int64
        num_sequences: S
    """
    kept = torch.where(loss_mask, values, values.new_zeros(()))
    return values.new_zeros(num_sequences).index_add(0, sequence_index, kept)


def sequence_means(values: Tensor, loss_mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """The same, divided by the number of masked tokens; 0 for a sequence without any."""
    counts = sequence_sums(loss_mask.to(values.dtype), loss_mask, sequence_index, num_sequences)
    return sequence_sums(values, loss_mask, sequence_index, num_sequences) / counts.clamp(min=1)


def dpo_loss(differences: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """−(1 − α) log σ(d) − α log σ(−d), with d = β h (DPO, arXiv 2305.18290, eq. 7).

    α is the share of pairs that are labelled the wrong way round (conservative DPO, E. Mitchell, 2023).

    Args:
        differences: [N] of implicit rewards β Σ(π − ref).
        label_smoothing: α, 0 to 0.5.
    """
    return -(1 - label_smoothing) * logsigmoid(differences) - label_smoothing * logsigmoid(-differences)


def ipo_loss(differences: Tensor, beta: float) -> Tensor:
    """(h − 1/(2β))² (IPO, arXiv 2310.12036, eq. 17).

    Args:
        differences: [N] h, of Σ(π − ref), or of its mean over tokens.
    """
    return (differences - 1 / (2 * beta)).square()


def simpo_loss(differences: Tensor, margin: float) -> Tensor:
    """−log σ(d − γ), with d of β times the mean logprob (SimPO, arXiv 2405.14734, eq. 6).

    Args:
        differences: [N]
        margin: γ
    """
    return -logsigmoid(differences - margin)


def log_odds(mean_logprobs: Tensor) -> Tensor:
    """log(p / (1 − p)) of p = exp(mean logprob), [S] (ORPO, arXiv 2403.07691, eq. 4)."""
    bounded = mean_logprobs.clamp(max=MAX_MEAN_LOGPROB)
    return bounded - torch.log(-torch.expm1(bounded))


def kto_loss(
    scores: Tensor, reference_point: Tensor | float, labels: Tensor, desirable: float = 1.0, undesirable: float = 1.0
) -> Tensor:
    """λ_D (1 − σ(s − z)) of a good completion, λ_U (1 − σ(z − s)) of a bad one (KTO, arXiv 2402.01306, eq. 8).

    Args:
        scores: [S] s, β Σ(π − ref).
        reference_point: z, β times the estimate of KL(π ‖ ref), not below 0, without gradient.
        labels: [S] 1 for a good completion, 0 for a bad one.
        desirable: λ_D
        undesirable: λ_U
    """
    good = labels > 0
    signed = torch.where(good, scores - reference_point, reference_point - scores)
    weights = torch.where(good, desirable, undesirable).to(scores.dtype)
    return weights * (1 - signed.sigmoid())


def bradley_terry_loss(differences: Tensor, margins: Tensor | float = 0.0) -> Tensor:
    """−log σ(r_c − r_r − m) (InstructGPT, arXiv 2203.02155, eq. 1; margins of Llama 2, arXiv 2307.09288, eq. 2).

    Args:
        differences: [N] of a reward model's scores.
        margins: [N], by how much the chosen one should be ahead.
    """
    return -logsigmoid(differences - margins)
