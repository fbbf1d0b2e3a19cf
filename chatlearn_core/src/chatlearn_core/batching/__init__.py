"""Division of samples into mini-batches, ranks' shares and micro-batches: lists of indices, no tensors."""

from chatlearn_core.batching.balance import balance
from chatlearn_core.batching.micro_batch import micro_batches, padded_micro_batches, padded_tokens
from chatlearn_core.batching.mini_batch import mini_batches

__all__ = [
    "balance",
    "micro_batches",
    "mini_batches",
    "padded_micro_batches",
    "padded_tokens",
]
