"""Random batches, and a loss with a reference implementation that runs a plain forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from chatlearn_core.protocols import LossOutput
from chatlearn_core.protocols.loss import Unit
from chatlearn_core.types import Metric, OutputRequest, Outputs, TrainBatch, cumulative_lengths

LENGTHS = (17, 12, 1, 7, 24, 2, 9)
"""Sequence lengths in ``make_batch``, tokens; one sequence is a single token, which contributes no loss."""
MASKED_SHARE = 0.3
"""Expected fraction of tokens outside the loss mask, besides first tokens."""


def make_batch(vocab_size: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> TrainBatch:
    """Build a batch of random sequences with a random loss mask and a random advantage per token.

    Args:
        lengths: number of tokens of each sequence.
    """
    generator = torch.Generator().manual_seed(seed)
    total, bounds, count = sum(lengths), cumulative_lengths(lengths), len(lengths)
    mask = torch.rand(total, generator=generator) > MASKED_SHARE
    mask[bounds[:-1].long()] = False
    return TrainBatch(
        sample_ids=tuple(f"sample-{i}" for i in range(count)),
        token_ids=torch.randint(0, vocab_size, (total,), generator=generator),
        cu_seqlens=bounds,
        loss_mask=mask,
        unit_index=torch.arange(count),
        group_index=torch.arange(count),
        token_data={"advantages": torch.randn(total, generator=generator)},
    )


def sequences(batch: TrainBatch, values: Tensor) -> list[Tensor]:
    """Split [T] per-token values into one tensor per sequence."""
    bounds = batch.cu_seqlens.tolist()
    return [values[start:stop] for start, stop in pairwise(bounds)]


@dataclass(frozen=True)
class MaskedPolicyLoss:
    """The mean of ``-advantage * logprob`` over the tokens in the loss mask; applies the mask in the loss itself."""

    temperature: float = 1.0
    unit: Unit = "sequence"

    @property
    def needs(self) -> OutputRequest:
        """The policy's logprobs."""
        return OutputRequest(frozenset({"logprobs"}), self.temperature)

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        """Add ``loss_weight``: 1 / number of tokens in the mask, at every token, so that only the mask selects."""
        weight = torch.full((batch.num_tokens,), 1.0 / max(1, int(batch.loss_mask.sum())))
        return replace(batch, token_data=batch.token_data | {"loss_weight": weight})

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        """See ``Loss``. The metric ``policy/logprob`` is a mean over tokens."""
        mask, logprobs = batch.loss_mask, outputs["logprobs"]
        terms = batch.token_data["loss_weight"] * batch.token_data["advantages"] * logprobs
        total = -torch.where(mask, terms, torch.zeros_like(terms)).sum()
        metric = Metric(float(logprobs.detach()[mask].sum()), float(mask.sum()))
        return LossOutput(total, {"policy/logprob": metric})


def reference_logprobs(reference: torch.nn.Module, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute [T] logprobs of one sequence with a forward of it alone; 0 at the first token. Keeps the graph."""
    distribution = torch.log_softmax(reference(token_ids) / temperature, -1)
    chosen = distribution[:-1].gather(-1, token_ids[1:, None])[:, 0]
    return torch.cat([chosen.new_zeros(1), chosen])


def reference_entropy(reference: torch.nn.Module, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute [T] entropies, nats, of the distributions of one sequence's tokens; 0 at the first. Keeps the graph."""
    distribution = torch.log_softmax(reference(token_ids) / temperature, -1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return torch.cat([entropy.new_zeros(1), entropy[:-1]])


def reference_loss(reference: torch.nn.Module, batch: TrainBatch, temperature: float = 1.0) -> Tensor:
    """Compute ``MaskedPolicyLoss`` of a batch in a loop over its sequences. Keeps the graph."""
    total = torch.zeros(())
    parts = zip(
        sequences(batch, batch.token_ids),
        sequences(batch, batch.loss_mask),
        sequences(batch, batch.token_data["advantages"]),
        strict=True,
    )
    for token_ids, mask, advantages in parts:
        total = total - (reference_logprobs(reference, token_ids, temperature) * advantages * mask).sum()
    return total / max(1, int(batch.loss_mask.sum()))
