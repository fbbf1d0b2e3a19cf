"""Micro-batches of sequences in rows of their own, padded to the longest."""

from __future__ import annotations

from collections.abc import Sequence

from chatlearn_core.batching.balance import units_in_order


def padded_micro_batches(
    batch_lengths: Sequence[int], unit_index: Sequence[int], max_tokens: int, *, at_least: int = 0
) -> list[list[int]]:
    """Divide a batch whose sequences are padded to the longest of their micro-batch; padding counts in the budget.

    Units of similar length are grouped: sorted by their longest sequence, each joins the previous micro-batch if that
    stays within ``max_tokens``. The result depends only on the arguments.

    Args:
        batch_lengths: tokens of each sequence.
        unit_index: unit of each sequence; a unit is never split.
        max_tokens: budget of one micro-batch, padding included. A unit above the budget gets its own micro-batch.
        at_least: number of micro-batches that ranks agreed on; if there are fewer, those with the most units are
            halved, and without enough units some are empty.

    Returns:
        As for ``chatlearn_core.batching.micro_batches``; the one with the most tokens, padding included, comes first.
    """
    assert max_tokens >= 1, f"max_tokens is {max_tokens}"
    members = units_in_order(unit_index)
    longest = [max(batch_lengths[i] for i in unit) for unit in members]
    bins: list[list[int]] = []
    rows = 0
    for unit in sorted(range(len(members)), key=lambda unit: (-longest[unit], unit)):
        # Units are sorted, so the first unit of a micro-batch has its longest sequence.
        if not bins or (rows + len(members[unit])) * longest[bins[-1][0]] > max_tokens:
            bins.append([])
            rows = 0
        bins[-1].append(unit)
        rows += len(members[unit])
    while len(bins) < min(at_least, len(members)):
        fullest = max(range(len(bins)), key=lambda place: len(bins[place]))
        units = bins[fullest]
        bins[fullest : fullest + 1] = [units[: len(units) // 2], units[len(units) // 2 :]]
    cut = [sorted(i for unit in bin_ for i in members[unit]) for bin_ in bins]
    cut.sort(key=lambda indices: (-padded_tokens(batch_lengths, indices), indices[0]))
    return cut + [[] for _ in range(at_least - len(cut))]


def padded_tokens(batch_lengths: Sequence[int], indices: Sequence[int]) -> int:
    """Number of tokens of some sequences when padded to the longest of them."""
    return len(indices) * max((batch_lengths[i] for i in indices), default=0)
