"""IPO (arXiv 2310.12036)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from chatlearn_algorithms.offline_pairs import OfflinePairs
from chatlearn_algorithms.pair_loss import PairLoss
from chatlearn_algorithms.preference_options import IPOOptions
from chatlearn_core.types import Outputs, TrainBatch
from chatlearn_losses import Pairs, ipo_loss, masked_difference, sequence_means, sequence_sums


@dataclass(slots=True, frozen=True)
class IPOLoss(PairLoss):
    """(h − 1/(2β))², with h the difference of Σ(π − ref), or of its means over tokens; eq. 17 of the paper."""

    beta: float = 0.1
    token_means: bool = False
    reference_logprobs: str = "reference_logprobs"

    def scores(self, outputs: Outputs, batch: TrainBatch) -> Tensor:
        """[S] log-ratios to the reference."""
        reference = batch.token_data[self.reference_logprobs]
        ratios = masked_difference(outputs["logprobs"], reference, batch.loss_mask)
        reduce = sequence_means if self.token_means else sequence_sums
        return reduce(ratios, batch.loss_mask, batch.sequence_index, batch.num_sequences)

    def losses(self, scores: Tensor, pairs: Pairs, outputs: Outputs, batch: TrainBatch) -> Tensor:
        """[N]"""
        return ipo_loss(scores[pairs.chosen] - scores[pairs.rejected], self.beta)


class IPO(OfflinePairs):
    """Moves the difference between chosen and rejected completions to a fixed size, so that certain preferences do not
    increase it without bound.
    """

    options: IPOOptions

    def loss(self) -> IPOLoss:
        """The loss with the configured options."""
        options = self.options
        return IPOLoss(
            beta=options.beta,
            token_means=options.token_means,
            reference_logprobs=f"{options.roles.reference}_logprobs",
        )
