"""The policy-gradient loss: an objective, and its optional parts KL, entropy bonus, importance correction."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from chatlearn_algorithms.aggregated_loss import AggregatedLoss, check_token_data
from chatlearn_algorithms.objectives import Clip, Objective
from chatlearn_algorithms.token_means import TokenMeans
from chatlearn_core.metrics.mismatch import mismatch_metrics
from chatlearn_core.protocols.aggregation import Aggregation
from chatlearn_core.protocols.loss import LossOutput
from chatlearn_core.types import KEPT_IDS, OutputRequest, Outputs, TrainBatch
from chatlearn_losses import (
    AggregationMode,
    CorrectionLevel,
    CorrectionMode,
    KLClamp,
    KLEstimator,
    KLWeight,
    importance_ratio,
    importance_weights,
    kl_estimate,
    masked_difference,
    masked_log_ratio,
    topk_kl,
)


@dataclass(slots=True, frozen=True)
class ImportanceCorrection:
    """Settings of ``chatlearn_losses.importance_weights``."""

    mode: CorrectionMode
    level: CorrectionLevel
    threshold: float
    minimum: float | None = None


@dataclass(slots=True, frozen=True)
class PolicyLoss(AggregatedLoss):
    """Σ w (f·clip(ρ, A) + β·v·KL − η·H) over the masked tokens.

    w are the aggregation weights of the global mini-batch, ρ = exp(π − old), f the detached importance weights
    exp(old − generator), limited (1 without a correction), v the weight of the KL (``KLWeight``), H the entropy. Reads
    ``token_data``: ``advantages``, the old logprobs, and those of reference and generator where KL and correction need
    them.
    """

    objective: Objective = field(default_factory=Clip)
    """The loss of a token before KL and entropy; PPO's clip by default."""
    aggregation: AggregationMode | Aggregation = "seq_mean_token_mean"
    """Aggregation: a name in ``chatlearn_losses``, or one that a plugin registers."""
    constant_length: int | None = None
    """Length for ``seq_mean_token_sum_norm``, if the aggregation is given by name."""
    kl_coef: float = 0.0
    kl_estimator: KLEstimator | Literal["full"] = "k3"
    """``full``: over the reference's most likely tokens (``topk_kl``), which the flow has asked of it."""
    kl_weight: KLWeight = "none"
    kl_clamp: KLClamp = "k3"
    entropy_coef: float = 0.0
    log_entropy: bool = True
    correction: ImportanceCorrection | None = None
    old_logprobs: str = "trainer_logprobs"
    """``token_data`` that the ratio's denominator is read from; ``generator_logprobs``: what the tokens were sampled
    with."""
    reference: str = "reference"
    """Role in the names ``<role>_logprobs`` (``<role>_truncated_logprobs``), or ``<role>_topk_logprobs`` and
    ``<role>_topk_ids``, which a KL reads."""
    temperature: float = 1.0
    """Temperature of the compared distributions: the sampling temperature."""
    truncated: bool = False
    """Logprobs of the policy are over the ids in ``token_data["kept_ids"]``; those that the loss reads must be, too."""

    @property
    def needs(self) -> OutputRequest:
        names, arguments = {self._logprobs}, {}
        if self.truncated:
            arguments["kept"] = KEPT_IDS
        if self._wants_entropy:
            names.add("entropy")
        if self._full_kl:
            names.add("logprobs_at")
            arguments["ids"] = f"{self.reference}_topk_ids"
        return OutputRequest(frozenset(names), self.temperature, arguments)

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        """Add ``loss_weight``, [T].

        This reads no logprobs, because on a cluster they stay on the workers that computed them. Values derived from
        them need only whole sequences, so the loss computes them.

        Raises:
            FlowError: a per-token array that the loss reads is missing.
        """
        remedy = "A flow must join the outputs of every role that the options need: <role>.logprobs(samples) gives"
        check_token_data(batch, self._token_data, "The policy loss", f"{remedy} <role>_logprobs.")
        return replace(batch, token_data=batch.token_data | {"loss_weight": self.weights(batch)})

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        """The loss of one micro-batch and its metrics, per-token means by sum and count over the loss mask."""
        logprobs = outputs[self._logprobs]
        if not batch.num_sequences:
            return LossOutput(logprobs.sum())
        mask, data, means = batch.loss_mask, batch.token_data, TokenMeans(batch.loss_mask)
        weight, old, zero = data["loss_weight"], data[self.old_logprobs], logprobs.new_zeros(())

        clip = self.objective(torch.where(mask, logprobs, zero), masked_log_ratio(logprobs, old, mask), batch)
        total = pg_loss = (weight * self._correction(batch, means) * clip.per_token).sum()
        if self.kl_coef:
            total = total + self.kl_coef * (weight * self._kl(outputs, batch, means)).sum()
        if self.entropy_coef:
            total = total - self.entropy_coef * (weight * torch.where(mask, outputs["entropy"], zero)).sum()

        means.values |= {"pg_clipfrac": clip.clipped}
        means.values |= {"pg_clipfrac_lower": clip.dual_clipped} if clip.dual_clipped is not None else {}
        means.values |= {"entropy": outputs["entropy"]} if self._wants_entropy else {}
        means.distances |= {"ppo_kl": masked_difference(old, logprobs.detach(), mask)}
        metrics = means.metrics(pg_loss=pg_loss)
        if self.old_logprobs == "generator_logprobs":
            # No other output has trainer logprobs to compare with. From a step's second update on, the difference
            # includes the effect of the updates.
            metrics |= mismatch_metrics(logprobs, old, mask)
        return LossOutput(total, metrics)

    def _correction(self, batch: TrainBatch, means: TokenMeans) -> Tensor | float:
        """[T] f, or 1; adds its metrics."""
        if self.correction is None:
            return 1.0
        corrected = importance_weights(
            batch.token_data[self.old_logprobs],
            batch.token_data["generator_logprobs"],
            batch,
            mode=self.correction.mode,
            level=self.correction.level,
            threshold=self.correction.threshold,
            minimum=self.correction.minimum,
        )
        means.values |= {"importance_weight": corrected.weights, "importance_clipfrac": corrected.limited}
        return corrected.weights

    def _kl(self, outputs: Outputs, batch: TrainBatch, means: TokenMeans) -> Tensor:
        """[T] v·KL, with gradient; adds its metrics."""
        logprobs, mask = outputs[self._logprobs], batch.loss_mask
        zero = logprobs.new_zeros(())
        if self._full_kl:
            chosen = (outputs["logprobs_at"], batch.token_data[f"{self.reference}_topk_logprobs"].to(logprobs))
            kl = topk_kl(*(torch.where(mask[:, None], values, zero) for values in chosen)) * mask
            means.values |= {"kl_loss": kl}
            return kl
        assert self.kl_estimator != "full"
        reference_logprobs = batch.token_data[f"{self.reference}_{self._logprobs}"]
        policy, reference = (torch.where(mask, values, zero) for values in (logprobs, reference_logprobs))
        k3 = kl_estimate(policy.detach().double(), reference.double(), "k3", clamp="none")
        means.distances |= {"reference_kl_k1": policy.detach() - reference, "reference_kl": k3}
        weights = self._kl_weights(logprobs, batch)
        kl = kl_estimate(policy, reference, self.kl_estimator, clamp=self.kl_clamp, weights=weights)
        means.values |= {"kl_loss": kl}
        return kl

    def _kl_weights(self, logprobs: Tensor, batch: TrainBatch) -> Tensor | None:
        """The weight of each token's KL, with gradient."""
        if self.kl_weight == "none":
            return None
        if self.kl_weight == "score":
            return importance_ratio(logprobs, logprobs.detach(), batch.loss_mask)
        denominator = self.old_logprobs if self.kl_weight == "ratio" else "generator_logprobs"
        return importance_ratio(logprobs, batch.token_data[denominator], batch.loss_mask)

    @property
    def _logprobs(self) -> str:
        """The output whose ratio the loss takes."""
        return "truncated_logprobs" if self.truncated else "logprobs"

    @property
    def _full_kl(self) -> bool:
        return self.kl_coef != 0.0 and self.kl_estimator == "full"

    @property
    def _wants_entropy(self) -> bool:
        return self.log_entropy or self.entropy_coef != 0.0

    @property
    def _token_data(self) -> set[str]:
        """Names of the token data that the loss reads."""
        needed = {"advantages", self.old_logprobs}
        if self.truncated:
            needed.add(KEPT_IDS)
        if self._full_kl:
            needed |= {f"{self.reference}_topk_ids", f"{self.reference}_topk_logprobs"}
        elif self.kl_coef:
            needed.add(f"{self.reference}_{self._logprobs}")
        if self.correction is not None or (self.kl_coef and self.kl_weight == "generator_ratio"):
            needed.add("generator_logprobs")
        return needed
