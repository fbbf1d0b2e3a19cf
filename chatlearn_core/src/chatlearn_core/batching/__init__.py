"""Packing of a step's samples, and their division into mini-batches, ranks' shares and micro-batches."""

from chatlearn_core.batching.balance import balance
from chatlearn_core.batching.micro_batch import micro_batches
from chatlearn_core.batching.mini_batch import mini_batches
from chatlearn_core.batching.sample_packer import SamplePacker

__all__ = ["SamplePacker", "balance", "micro_batches", "mini_batches"]
