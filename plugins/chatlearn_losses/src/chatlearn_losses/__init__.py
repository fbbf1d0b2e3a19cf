"""What losses are made of: pure functions on packed per-token tensors."""

from chatlearn_losses.aggregation import AggregationMode, aggregation_weights
from chatlearn_losses.clip import ClippedLoss, clipped_policy_loss, clipped_weight_loss
from chatlearn_losses.importance import (
    CorrectionLevel,
    CorrectionMode,
    ImportanceWeights,
    check_same_basis,
    importance_weights,
)
from chatlearn_losses.kl import KLClamp, KLEstimator, KLWeight, full_kl, kl_estimate, topk_kl
from chatlearn_losses.logprobs import (
    TokenLogprobs,
    logprobs_at,
    prediction_rows,
    token_logprobs,
    token_logprobs_from_hidden,
)
from chatlearn_losses.overlong import overlong_penalty
from chatlearn_losses.ratio import (
    importance_ratio,
    masked_difference,
    masked_log_ratio,
    sequence_log_ratio,
    straight_through_ratio,
)
from chatlearn_losses.returns import Advantages, discounted_returns, gae, rewards_at_actions, whiten
from chatlearn_losses.value import ValueLoss, clipped_value_loss

__all__ = [
    "Advantages",
    "AggregationMode",
    "ClippedLoss",
    "CorrectionLevel",
    "CorrectionMode",
    "ImportanceWeights",
    "KLClamp",
    "KLEstimator",
    "KLWeight",
    "TokenLogprobs",
    "ValueLoss",
    "aggregation_weights",
    "check_same_basis",
    "clipped_policy_loss",
    "clipped_value_loss",
    "clipped_weight_loss",
    "discounted_returns",
    "full_kl",
    "gae",
    "importance_ratio",
    "importance_weights",
    "kl_estimate",
    "logprobs_at",
    "masked_difference",
    "masked_log_ratio",
    "overlong_penalty",
    "prediction_rows",
    "rewards_at_actions",
    "sequence_log_ratio",
    "straight_through_ratio",
    "token_logprobs",
    "token_logprobs_from_hidden",
    "topk_kl",
    "whiten",
]
