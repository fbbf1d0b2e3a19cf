"""Micro-batches by token budget: divides a rank's share of a mini-batch to fit device memory."""

from __future__ import annotations

from collections.abc import Sequence

from chatlearn_core.batching.balance import units_in_order
from chatlearn_core.batching.partition import best_fit_decreasing, partition


def micro_batches(
    batch_lengths: Sequence[int], unit_index: Sequence[int], max_tokens: int, *, at_least: int = 0
) -> list[list[int]]:
    """Divide a batch into as few micro-batches of at most ``max_tokens`` as best-fit-decreasing finds, evenly filled.

    Their number is fixed first; the units are then spread evenly over them, if that stays within the budget, because
    the largest micro-batch determines peak memory. The result depends only on the arguments.

    Args:
        batch_lengths: tokens of each sequence.
        unit_index: unit of each sequence; a unit is never split.
        max_tokens: budget of one micro-batch. A unit above the budget gets its own micro-batch.
        at_least: number of micro-batches that ranks agreed on; if there are fewer, units are spread over more
            micro-batches, and without enough units some are empty.

    Returns:
        Indices of each micro-batch's sequences, ascending; the micro-batch with the most tokens comes first, so that a
        budget too large for the device shows at once.
    """
    assert max_tokens >= 1, f"max_tokens is {max_tokens}"
    members = units_in_order(unit_index)
    sizes = [sum(batch_lengths[i] for i in unit) for unit in members]
    oversized = [[unit] for unit, size in enumerate(sizes) if size > max_tokens]
    fitting = [unit for unit, size in enumerate(sizes) if size <= max_tokens]

    fitting_sizes = [sizes[unit] for unit in fitting]
    bins = best_fit_decreasing(fitting_sizes, max_tokens)
    wanted = min(max(len(bins), at_least - len(oversized)), len(fitting))
    if wanted:
        even = partition(fitting_sizes, wanted)
        if max(sum(fitting_sizes[k] for k in bin_) for bin_ in even) <= max_tokens:
            bins = even
    filled = [*oversized, *([fitting[k] for k in bin_] for bin_ in bins if bin_)]
    cut = [sorted(i for unit in bin_ for i in members[unit]) for bin_ in filled]
    cut.sort(key=lambda indices: (-sum(batch_lengths[i] for i in indices), indices[0]))
    return cut + [[] for _ in range(at_least - len(cut))]
