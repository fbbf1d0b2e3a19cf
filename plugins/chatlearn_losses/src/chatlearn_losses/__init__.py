"""What losses are made of: pure functions on packed per-token tensors."""

from chatlearn_losses.aggregation import AggregationMode, aggregation_weights
from chatlearn_losses.clip import ClippedLoss, clipped_policy_loss
from chatlearn_losses.importance import (
    CorrectionLevel,
    CorrectionMode,
    ImportanceWeights,
    check_same_basis,
    importance_weights,
)
from chatlearn_losses.kl import KLClamp, KLEstimator, KLWeight, full_kl, kl_estimate
from chatlearn_losses.logprobs import (
    TokenLogprobs,
    logprobs_at,
    prediction_rows,
    token_logprobs,
    token_logprobs_from_hidden,
)
from chatlearn_losses.ratio import importance_ratio, masked_difference, masked_log_ratio, sequence_log_ratio

__all__ = [
    "AggregationMode",
    "ClippedLoss",
    "CorrectionLevel",
    "CorrectionMode",
    "ImportanceWeights",
    "KLClamp",
    "KLEstimator",
    "KLWeight",
    "TokenLogprobs",
    "aggregation_weights",
    "check_same_basis",
    "clipped_policy_loss",
    "full_kl",
    "importance_ratio",
    "importance_weights",
    "kl_estimate",
    "logprobs_at",
    "masked_difference",
    "masked_log_ratio",
    "prediction_rows",
    "sequence_log_ratio",
    "token_logprobs",
    "token_logprobs_from_hidden",
]
