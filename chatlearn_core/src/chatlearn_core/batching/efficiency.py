"""What share of the computed token positions are real."""

from __future__ import annotations

from collections.abc import Sequence


def packing_efficiency(lengths: Sequence[int], micro_batches: Sequence[Sequence[int]], max_tokens: int) -> float:
    """Real tokens over the token budget of the micro-batches that hold them, in [0, 1].

    A micro-batch above the budget (a unit too long for it) counts with its own size, an empty one not at all. With no
    tokens it is 1.
    """
    filled = [sum(lengths[i] for i in batch) for batch in micro_batches if batch]
    return _share(sum(filled), sum(max(tokens, max_tokens) for tokens in filled))


def padding_efficiency(lengths: Sequence[int], batch_size: int) -> float:
    """Real tokens over computed ones when sequences, in their order, are padded to the longest of their batch."""
    batches = [lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
    return _share(sum(lengths), sum(max(batch) * len(batch) for batch in batches))


def _share(real: int, computed: int) -> float:
    return real / computed if computed else 1.0
