"""DPO (arXiv 2305.18290), with label smoothing (conservative DPO)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from chatlearn_algorithms.offline_pairs import OfflinePairs
from chatlearn_algorithms.pair_loss import PairLoss, mean_logprobs
from chatlearn_algorithms.preference_options import DPOOptions
from chatlearn_core.types import Outputs, TrainBatch
from chatlearn_losses import Pairs, dpo_loss, masked_difference, sequence_sums


@dataclass(slots=True, frozen=True)
class DPOLoss(PairLoss):
    """−(1 − α) log σ(d) − α log σ(−d), with d = β (Σ(π_c − ref_c) − Σ(π_r − ref_r)), eq. 7 of the paper."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    sft_coef: float = 0.0
    reference_logprobs: str = "reference_logprobs"

    def scores(self, outputs: Outputs, batch: TrainBatch) -> Tensor:
        """[S] implicit rewards β Σ(π − ref)."""
        reference = batch.token_data[self.reference_logprobs]
        ratios = masked_difference(outputs["logprobs"], reference, batch.loss_mask)
        return self.beta * sequence_sums(ratios, batch.loss_mask, batch.sequence_index, batch.num_sequences)

    def losses(self, scores: Tensor, pairs: Pairs, outputs: Outputs, batch: TrainBatch) -> Tensor:
        """[N]"""
        losses = dpo_loss(scores[pairs.chosen] - scores[pairs.rejected], self.label_smoothing)
        if self.sft_coef:
            losses = losses - self.sft_coef * mean_logprobs(outputs, batch)[pairs.chosen]
        return losses


class DPO(OfflinePairs):
    """Raises the likelihood of chosen over rejected completions, relative to the reference."""

    options: DPOOptions

    def loss(self) -> DPOLoss:
        """The loss with the configured options."""
        options = self.options
        return DPOLoss(
            beta=options.beta,
            label_smoothing=options.label_smoothing,
            sft_coef=options.sft_coef,
            reference_logprobs=f"{options.roles.reference}_logprobs",
        )
