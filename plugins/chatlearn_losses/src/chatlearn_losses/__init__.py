"""Building blocks of losses: pure functions on packed per-token tensors."""

from chatlearn_losses.aggregation import AggregationMode, aggregation_weights
from chatlearn_losses.clip import ClippedLoss, clipped_policy_loss, clipped_weight_loss
from chatlearn_losses.divergence import generalised_jsd
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
    default_chunk_tokens,
    logprobs_at,
    prediction_rows,
    token_logprobs,
    token_logprobs_from_hidden,
    truncated_logprobs,
)
from chatlearn_losses.overlong import overlong_penalty
from chatlearn_losses.pairs import Pairs, best_and_worst, groups, ordered_pairs
from chatlearn_losses.preference import (
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kto_loss,
    log_odds,
    sequence_means,
    sequence_sums,
    simpo_loss,
)
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
    "Pairs",
    "TokenLogprobs",
    "ValueLoss",
    "aggregation_weights",
    "best_and_worst",
    "bradley_terry_loss",
    "check_same_basis",
    "clipped_policy_loss",
    "clipped_value_loss",
    "clipped_weight_loss",
    "default_chunk_tokens",
    "discounted_returns",
    "dpo_loss",
    "full_kl",
    "gae",
    "generalised_jsd",
    "groups",
    "importance_ratio",
    "importance_weights",
    "ipo_loss",
    "kl_estimate",
    "kto_loss",
    "log_odds",
    "logprobs_at",
    "masked_difference",
    "masked_log_ratio",
    "ordered_pairs",
    "overlong_penalty",
    "prediction_rows",
    "rewards_at_actions",
    "sequence_log_ratio",
    "sequence_means",
    "sequence_sums",
    "simpo_loss",
    "straight_through_ratio",
    "token_logprobs",
    "token_logprobs_from_hidden",
    "topk_kl",
    "truncated_logprobs",
    "whiten",
]
