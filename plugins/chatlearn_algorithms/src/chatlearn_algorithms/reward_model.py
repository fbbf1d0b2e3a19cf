"""Reward-model training by the Bradley-Terry model (InstructGPT, arXiv 2203.02155), with margins (Llama 2, arXiv
2307.09288) and centred scores (arXiv 2312.09244).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from chatlearn_algorithms.offline_pairs import OfflinePairs
from chatlearn_algorithms.pair_loss import RANK, PairLoss
from chatlearn_algorithms.preference_options import RewardModelOptions
from chatlearn_core.protocols import AlgorithmContext
from chatlearn_core.types import OutputRequest, Outputs, TrainBatch
from chatlearn_losses import Pairs, bradley_terry_loss


@dataclass(slots=True, frozen=True)
class RewardModelLoss(PairLoss):
    """−log σ(r_c − r_r − m) + c (r_c + r_r)², with margins m of ``margin_coef`` times the difference in rank."""

    margin_coef: float = 0.0
    centring_coef: float = 0.0

    @property
    def needs(self) -> OutputRequest:
        return OutputRequest(frozenset({"scores"}))

    def scores(self, outputs: Outputs, batch: TrainBatch) -> Tensor:
        """[S] the reward head's output at the last token."""
        return outputs["scores"]

    def losses(self, scores: Tensor, pairs: Pairs, outputs: Outputs, batch: TrainBatch) -> Tensor:
        """[N]"""
        ranks = batch.sequence_data[RANK].to(scores.dtype)
        chosen, rejected = scores[pairs.chosen], scores[pairs.rejected]
        margins = self.margin_coef * (ranks[pairs.chosen] - ranks[pairs.rejected])
        return bradley_terry_loss(chosen - rejected, margins) + self.centring_coef * (chosen + rejected).square()


class RewardModel(OfflinePairs):
    """Learns to score chosen completions above rejected ones."""

    options: RewardModelOptions
    output = "scores"

    def __init__(self, options: RewardModelOptions, context: AlgorithmContext) -> None:
        super().__init__(options, context)
        self.policy = None
        self.evaluation_input = self.input

    def loss(self) -> RewardModelLoss:
        """The loss with the configured options."""
        return RewardModelLoss(margin_coef=self.options.margin_coef, centring_coef=self.options.centring_coef)
