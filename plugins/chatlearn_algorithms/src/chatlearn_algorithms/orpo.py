"""ORPO (arXiv 2403.07691)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from chatlearn_algorithms.offline_pairs import OfflinePairs
from chatlearn_algorithms.pair_loss import PairLoss, mean_logprobs
from chatlearn_algorithms.preference_options import ORPOOptions
from chatlearn_core.types import Outputs, TrainBatch
from chatlearn_losses import Pairs, dpo_loss, log_odds


@dataclass(slots=True, frozen=True)
class ORPOLoss(PairLoss):
    """−π̄_c − λ log σ(logit(e^π̄_c) − logit(e^π̄_r)), with π̄ the mean logprob of a completion's tokens; eqs. 6 and 7."""

    odds_ratio_coef: float = 0.1

    def scores(self, outputs: Outputs, batch: TrainBatch) -> Tensor:
        """[S] log-odds of the completions."""
        return log_odds(mean_logprobs(outputs, batch))

    def losses(self, scores: Tensor, pairs: Pairs, outputs: Outputs, batch: TrainBatch) -> Tensor:
        """[N]"""
        likelihood = mean_logprobs(outputs, batch)[pairs.chosen]
        return self.odds_ratio_coef * dpo_loss(scores[pairs.chosen] - scores[pairs.rejected]) - likelihood


class ORPO(OfflinePairs):
    """Imitates chosen completions and raises their odds over those of rejected ones, without a reference."""

    options: ORPOOptions

    def loss(self) -> ORPOLoss:
        """The loss with the configured options."""
        return ORPOLoss(odds_ratio_coef=self.options.odds_ratio_coef)
