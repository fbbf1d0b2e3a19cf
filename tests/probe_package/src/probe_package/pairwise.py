"""Direct preference optimization (arXiv 2305.18290, eq. 7) on pairs, without a generator."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from chatlearn_core.protocols import Algorithm, AlgorithmContext, LossOutput, RoleUpdate
from chatlearn_core.protocols.loss import Unit
from chatlearn_core.types import Metric, Metrics, OutputRequest, Outputs, TrainBatch
from probe_package.options import PairwiseOptions


def preferred_by(logprobs: Tensor, batch: TrainBatch) -> Tensor:
    """[pairs] how much more than the anchor the pupil prefers the better completion of each pair, nats.

    Args:
        logprobs: [T] of the pupil.
    """
    gains = torch.where(batch.loss_mask, logprobs - batch.token_data["anchor_logprobs"], 0.0)
    of_sequence = gains.new_zeros(batch.num_sequences).index_add(0, batch.sequence_index, gains)
    signs = torch.where(batch.sequence_data["rank"] > 0.5, 1.0, -1.0).to(gains.device, gains.dtype)
    pairs, index = batch.unit_index.unique(return_inverse=True)
    return gains.new_zeros(len(pairs)).index_add(0, index.to(gains.device), signs * of_sequence)


@dataclass(frozen=True)
class PairwiseLoss:
    """The mean over pairs of -log sigmoid(beta preferred_by)."""

    beta: float
    unit: Unit = "pair"

    @property
    def needs(self) -> OutputRequest:
        return OutputRequest(frozenset({"logprobs"}))

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        """Add the weight of a pair, at each of its sequences."""
        weights = torch.full((batch.num_sequences,), 1.0 / max(1, len(batch.unit_index.unique())))
        return replace(batch, sequence_data=batch.sequence_data | {"pair_weight": weights})

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        if not batch.num_sequences:
            return LossOutput(outputs["logprobs"].sum())
        preferred = preferred_by(outputs["logprobs"], batch)
        losses = -torch.nn.functional.logsigmoid(self.beta * preferred)
        right = Metric(int((preferred > 0).sum()), len(preferred))
        return LossOutput(losses.sum() * batch.sequence_data["pair_weight"][0], {"accuracy": right})


class Pairwise(Algorithm):
    """One learner, the pupil, and what it must not go far from, the anchor."""

    input = "preferences"
    evaluation_input = "preferences"

    def __init__(self, options: PairwiseOptions, context: AlgorithmContext) -> None:
        self.options = options

    def flow(self, pairs: Any, m: Any) -> Any:
        return m.join(pairs, m.anchor.logprobs(pairs, temperature=1.0))

    def updates(self, step: int) -> Sequence[RoleUpdate]:
        return [RoleUpdate("pupil", PairwiseLoss(self.options.beta))]

    def evaluation(self, pairs: Any, m: Any) -> Any:
        return m.join(pairs, m.anchor.logprobs(pairs, temperature=1.0), m.pupil.logprobs(pairs, temperature=1.0))

    def evaluation_metrics(self, batch: TrainBatch) -> Metrics:
        preferred = preferred_by(batch.token_data["pupil_logprobs"], batch)
        losses = -torch.nn.functional.logsigmoid(self.options.beta * preferred.double())
        count = len(preferred)
        return {"loss": Metric(float(losses.sum()), count), "accuracy": Metric(int((preferred > 0).sum()), count)}
