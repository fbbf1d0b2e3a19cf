"""Batches and a loss whose value and gradient a plain forward gives as well."""

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
"""Of the sequences in ``make_batch``; one of them is a single token, which has nothing to learn from."""
MASKED_SHARE = 0.3


def make_batch(vocab_size: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> TrainBatch:
    """Random sequences, some of whose tokens are masked, with an advantage for each token."""
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
    """Per-token values cut into those of each sequence."""
    bounds = batch.cu_seqlens.tolist()
    return [values[start:stop] for start, stop in pairwise(bounds)]


@dataclass(frozen=True)
class MaskedPolicyLoss:
    """The mean over masked-in tokens of ``-advantage * logprob``; reads the mask where the logits are."""

    temperature: float = 1.0
    unit: Unit = "sequence"

    @property
    def needs(self) -> OutputRequest:
        """Logprobs."""
        return OutputRequest(frozenset({"logprobs"}), self.temperature)

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        """Add the global denominator, the same weight at every token: the mask alone says which count."""
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
    """[T] logprobs of one sequence from a forward of it alone; 0 at the first token. Keeps the graph."""
    distribution = torch.log_softmax(reference(token_ids) / temperature, -1)
    chosen = distribution[:-1].gather(-1, token_ids[1:, None])[:, 0]
    return torch.cat([chosen.new_zeros(1), chosen])


def reference_entropy(reference: torch.nn.Module, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """[T] entropies, nats, of the distributions that one sequence's tokens were drawn from; 0 at the first."""
    distribution = torch.log_softmax(reference(token_ids) / temperature, -1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return torch.cat([entropy.new_zeros(1), entropy[:-1]])


def reference_loss(reference: torch.nn.Module, batch: TrainBatch) -> Tensor:
    """``MaskedPolicyLoss`` of a batch, sequence by sequence, in a loop. Keeps the graph."""
    total = torch.zeros(())
    parts = zip(
        sequences(batch, batch.token_ids),
        sequences(batch, batch.loss_mask),
        sequences(batch, batch.token_data["advantages"]),
        strict=True,
    )
    for token_ids, mask, advantages in parts:
        total = total - (reference_logprobs(reference, token_ids) * advantages * mask).sum()
    return total / max(1, int(batch.loss_mask.sum()))
