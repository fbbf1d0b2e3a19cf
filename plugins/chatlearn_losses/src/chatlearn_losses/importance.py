"""Importance weights that correct for the mismatch between the trainer's policy and the sampling policy.

The engine that samples and the trainer that learns compute slightly different distributions, and asynchronous samples
come from an older policy. w = exp(old − generator) re-weights each token's loss (truncated importance sampling, Yao et
al. 2025; masked: tokens with an extreme weight are excluded).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.types import LogprobBasis, TrainBatch
from chatlearn_losses.ratio import masked_log_ratio, sequence_log_ratio

CorrectionMode = Literal["truncate", "mask", "mask_sequences"]
"""With w the ratio: ``truncate``: w clipped to [minimum, threshold]; ``mask``: w inside these bounds, 0 outside
(IcePop); ``mask_sequences``: 0 in a sequence whose ratio is outside, otherwise each token's own ratio, not clipped
(OpenRLHF's and NeMo-RL's ``seq-mask-tis``).
"""
CorrectionLevel = Literal["token", "sequence", "sequence_geometric"]
"""``token``: each token's own ratio; ``sequence``: the product over the sequence; ``sequence_geometric``: its geometric
mean, which does not shrink with length."""


@dataclass(slots=True, frozen=True, eq=False)
class ImportanceWeights:
    """Detached weights, and the positions at which a bound changed them."""

    weights: Tensor
    """[T] float; 0 outside the loss mask."""
    limited: Tensor
    """[T] bool: truncated or masked."""


def importance_weights(
    old_logprobs: Tensor,
    generator_logprobs: Tensor,
    batch: TrainBatch,
    *,
    mode: CorrectionMode,
    level: CorrectionLevel,
    threshold: float,
    minimum: float | None = None,
) -> ImportanceWeights:
    """w = exp(old − generator), limited by C = ``threshold`` and from below.

    Args:
        old_logprobs: [T] of the trainer's policy at the start of the step.
        generator_logprobs: [T] of the distribution that was sampled, same basis (see ``check_same_basis``).
        batch: gives the loss mask and the sequences; sequences must be whole.
        mode: see ``CorrectionMode``. The loss's denominator still counts the masked tokens, so masking more of them
            does not amplify the rest.
        level: see ``CorrectionLevel``; for ``mask_sequences``, the ratio that is compared with the bounds.
        threshold: C, above 0.
        minimum: below C; by default none for ``truncate``, and 1/C for the others.

    Raises:
        ValueError: no weight lies between the bounds, or ``mask_sequences`` has level ``token``.
    """
    if minimum is None:
        minimum = 0.0 if mode == "truncate" else 1.0 / threshold
    if not 0.0 <= minimum <= threshold:
        raise ValueError(f"importance weights are to be between {minimum} and {threshold}: nothing is")
    if mode == "mask_sequences" and level == "token":
        raise ValueError("mask_sequences looks at the ratio of a sequence: level is sequence or sequence_geometric")
    mask = batch.loss_mask
    with torch.no_grad():
        token_ratio = log_ratio = masked_log_ratio(old_logprobs, generator_logprobs, mask)
        if level != "token":
            mean = level == "sequence_geometric"
            log_ratio = sequence_log_ratio(log_ratio, mask, batch.sequence_index, batch.num_sequences, mean=mean)
        ratio = log_ratio.exp()
        limited = (ratio > threshold) | (ratio < minimum)
        if mode == "truncate":
            weights = ratio.clamp(minimum, threshold)
        else:
            weights = (token_ratio.exp() if mode == "mask_sequences" else ratio).masked_fill(limited, 0.0)
        return ImportanceWeights(weights.masked_fill(~mask, 0.0), limited & mask)


def check_same_basis(
    first: LogprobBasis, second: LogprobBasis, *, first_name: str, second_name: str, wanted_by: str
) -> None:
    """Refuse to relate logprobs of two different distributions.

    Args:
        first: basis of the logprobs ``first_name``.
        second: basis of the logprobs ``second_name``.
        first_name: name for the error message, for example ``trainer_logprobs``.
        second_name: name for the error message.
        wanted_by: the setting that requires the comparison.

    Raises:
        ConfigError: the bases differ; the message names both and says how to make them equal.
    """
    if first == second:
        return
    differing = [
        f"{field} ({getattr(first, field)} against {getattr(second, field)})"
        for field in ("temperature", "top_p", "top_k")
        if getattr(first, field) != getattr(second, field)
    ]
    raise ConfigError(
        f"{wanted_by} compares {first_name} with {second_name}, which are logprobs of different distributions.\n"
        f"  {first_name}: {first}\n"
        f"  {second_name}: {second}\n"
        f"  They differ in {', '.join(differing)}.\n"
        f"  A trainer computes the whole distribution at the sampling temperature. Make the two agree: the generator's "
        f"option that chooses processed logprobs, if it is raw ones that it returns, or sampling.temperature: 1.0; and "
        f"sampling.top_p: 1.0, sampling.top_k: 0, or algorithm.options.truncated_logprobs: true, if the algorithm has "
        f"it, for logprobs over the tokens that top-k and top-p kept. Or change {wanted_by}."
    )
