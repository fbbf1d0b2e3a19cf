"""KTO (arXiv 2402.01306)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from chatlearn_algorithms.preference_options import KTOOptions
from chatlearn_core.protocols import Algorithm, AlgorithmContext, RoleUpdate
from chatlearn_core.protocols.loss import LossOutput, Unit
from chatlearn_core.types import Derived, Metric, Metrics, OutputRequest, Outputs, TrainBatch
from chatlearn_losses import kto_loss, masked_difference, sequence_sums

POINT = "kto_reference_point"
"""Key in ``sequence_data``: z, the estimate of KL(π ‖ ref), to which a step's completions are compared."""


@dataclass(slots=True, frozen=True)
class KTOLoss:
    """The mean over completions of λ_D (1 − σ(β (s − z))) for good and λ_U (1 − σ(β (z − s))) for bad ones, with
    s = Σ(π − ref); eq. 8 of the paper.
    """

    beta: float = 0.1
    desirable: float = 1.0
    undesirable: float = 1.0
    reference_logprobs: str = "reference_logprobs"

    @property
    def needs(self) -> OutputRequest:
        return OutputRequest(frozenset({"logprobs"}))

    @property
    def unit(self) -> Unit:
        return "sequence"

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        """Add ``completion_weight``: 1 over the number of completions."""
        weights = torch.full((batch.num_sequences,), 1.0 / max(1, batch.num_sequences))
        return replace(batch, sequence_data=batch.sequence_data | {"completion_weight": weights})

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        """The loss of one micro-batch; ``accuracy`` is the fraction of completions on the right side of z."""
        ratios = masked_difference(outputs["logprobs"], batch.token_data[self.reference_logprobs], batch.loss_mask)
        sums = sequence_sums(ratios, batch.loss_mask, batch.sequence_index, batch.num_sequences)
        point = batch.sequence_data[POINT].to(sums.dtype)
        labels = batch.sequence_data["label"]
        losses = kto_loss(self.beta * sums, self.beta * point, labels, self.desirable, self.undesirable)
        total = (batch.sequence_data["completion_weight"] * losses).sum()
        return LossOutput(total, self._metrics((self.beta * sums).detach(), self.beta * point, labels > 0))

    def _metrics(self, scores: Tensor, point: Tensor, good: Tensor) -> Metrics:
        right = torch.where(good, scores > point, scores < point)
        metrics: Metrics = {"accuracy": Metric(float(right.sum()), len(scores))}
        for name, side in (("desirable_score", good), ("undesirable_score", ~good)):
            if side.any():
                metrics[name] = Metric(float(scores[side].double().sum()), int(side.sum()))
        return metrics


class KTO(Algorithm):
    """Learns from single completions that are good or bad, by comparing their log-ratios with the policy's distance
    from the reference.
    """

    input = "labelled_completions"
    advantage_split = "batch"

    def __init__(self, options: KTOOptions, context: AlgorithmContext) -> None:
        self.options = options
        self.policy = options.roles.policy
        samples = {"generator", "reward"} <= set(context.roles.values())
        self.evaluation_input = None if samples else self.input

    def flow(self, completions: Any, m: Any) -> Any:
        """Compute the reference's logprobs, and the mismatched logprobs of policy and reference."""
        roles = self.options.roles
        policy, reference = getattr(m, roles.policy), getattr(m, roles.reference)
        cache = self.options.cache_reference
        parts = [reference.logprobs(completions, temperature=1.0, cache=cache)]
        if self.options.reference_point == "mismatched":
            parts.append(policy.mismatched_logprobs(completions, temperature=1.0))
            parts.append(reference.mismatched_logprobs(completions, temperature=1.0, cache=cache))
        return m.join(completions, *parts)

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        """Compute the reference point of a step: max(0, mean of π − ref over the mismatched pairs)."""
        roles, data = self.options.roles, batch.sequence_data
        point = 0.0
        if self.options.reference_point == "mismatched" and batch.num_sequences:
            ratios = data[f"{roles.policy}_mismatched_logprobs"] - data[f"{roles.reference}_mismatched_logprobs"]
            point = max(0.0, float(ratios.double().mean()))
        labels = data["label"]
        return Derived(
            sequence_data={POINT: torch.full((batch.num_sequences,), point, dtype=torch.float64)},
            metrics={
                "kto/reference_point": Metric(point),
                "kto/desirable": Metric(float((labels > 0).sum()), batch.num_sequences),
            },
        )

    def updates(self, step: int) -> Sequence[RoleUpdate]:
        """Update only the policy."""
        return [RoleUpdate(self.options.roles.policy, self.loss())]

    def loss(self) -> KTOLoss:
        """The loss with the configured options."""
        options = self.options
        return KTOLoss(
            options.beta,
            options.desirable_weight,
            options.undesirable_weight,
            f"{options.roles.reference}_logprobs",
        )

    def evaluation(self, completions: Any, m: Any) -> Any:
        """Compute the flow's outputs and the policy's logprobs of held-out completions."""
        policy = getattr(m, self.options.roles.policy)
        return m.join(self.flow(completions, m), policy.logprobs(completions, temperature=1.0))

    def evaluation_metrics(self, batch: TrainBatch) -> Metrics:
        """``loss`` and ``accuracy`` of held-out completions, with their own reference point."""
        batch = replace(batch, sequence_data=batch.sequence_data | self.advantages(batch, 0).sequence_data)
        loss = self.loss()
        with torch.no_grad():
            found = loss({"logprobs": batch.token_data[f"{self.options.roles.policy}_logprobs"]}, loss.prepare(batch))
        return {"loss": Metric(float(found.total) * batch.num_sequences, batch.num_sequences), **found.metrics}
