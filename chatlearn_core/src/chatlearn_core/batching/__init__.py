"""How samples become mini-batches, shares of ranks, and micro-batches: plain lists of indices, no tensors."""

from chatlearn_core.batching.balance import Cost, attention_cost, balance, token_cost
from chatlearn_core.batching.efficiency import packing_efficiency, padding_efficiency
from chatlearn_core.batching.micro_batch import micro_batches, padded_micro_batches, padded_tokens
from chatlearn_core.batching.mini_batch import mini_batches

__all__ = [
    "Cost",
    "attention_cost",
    "balance",
    "micro_batches",
    "mini_batches",
    "packing_efficiency",
    "padded_micro_batches",
    "padded_tokens",
    "padding_efficiency",
    "token_cost",
]
