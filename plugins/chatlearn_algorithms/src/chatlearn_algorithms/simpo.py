"""SimPO (arXiv 2405.14734)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from chatlearn_algorithms.offline_pairs import OfflinePairs
from chatlearn_algorithms.pair_loss import PairLoss, mean_logprobs
from chatlearn_algorithms.preference_options import SimPOOptions
from chatlearn_core.types import Outputs, TrainBatch
from chatlearn_losses import Pairs, simpo_loss


@dataclass(slots=True, frozen=True)
class SimPOLoss(PairLoss):
    """−log σ(β (π̄_c − π̄_r) − γ), with π̄ the mean logprob of a completion's tokens; eq. 6 of the paper."""

    beta: float = 2.0
    gamma: float = 1.0

    def scores(self, outputs: Outputs, batch: TrainBatch) -> Tensor:
        """[S] β π̄."""
        return self.beta * mean_logprobs(outputs, batch)

    def losses(self, scores: Tensor, pairs: Pairs, outputs: Outputs, batch: TrainBatch) -> Tensor:
        """[N]"""
        return simpo_loss(scores[pairs.chosen] - scores[pairs.rejected], self.gamma)


class SimPO(OfflinePairs):
    """Compares mean logprobs, with a margin and without a reference."""

    options: SimPOOptions

    def loss(self) -> SimPOLoss:
        """The loss with the configured options."""
        return SimPOLoss(beta=self.options.beta, gamma=self.options.gamma)
