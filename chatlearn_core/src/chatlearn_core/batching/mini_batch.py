"""Mini-batches: divides the samples of a step among several optimizer updates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from chatlearn_core.batching.balance import units_in_order


def mini_batches(
    unit_index: Sequence[int], num_mini_batches: int, *, generator: np.random.Generator | None = None
) -> list[list[int]]:
    """Divide the samples of a step, in whole units, into mini-batches whose numbers of units differ by at most one.

    Args:
        unit_index: unit (sequence, pair or group) of each sample.
        num_mini_batches: number of updates, at least 1.
        generator: shuffles the units before they are divided; None keeps their order.

    Returns:
        Sample indices of each mini-batch. With fewer units than ``num_mini_batches`` there is one mini-batch per unit,
        because an optimizer step over nothing would still decay weights and moments. No samples give no mini-batches.
    """
    assert num_mini_batches >= 1, f"num_mini_batches is {num_mini_batches}"
    units = units_in_order(unit_index)
    if generator is not None:
        units = [units[k] for k in generator.permutation(len(units))]
    num = min(num_mini_batches, len(units))
    bounds = [len(units) * k // num for k in range(num + 1)] if num else []
    return [[index for unit in units[start:stop] for index in unit] for start, stop in pairwise(bounds)]
