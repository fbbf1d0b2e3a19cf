from __future__ import annotations

import numpy as np

from chatlearn_transformers.slots import SlotTable


def test_growth_and_moves_keep_what_rows_hold():
    slots = SlotTable()
    slots.reserve(2, 3, 0)
    slots.counts[:] = [1, 2]
    slots.token_ids[:] = [[1, 2, 3], [4, 5, 6]]
    slots.reserve(4, 2, 2)
    assert slots.token_ids.shape == (4, 3)
    assert slots.token_ids[:2].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert slots.stop_ids.tolist() == [[-1, -1]] * 4
    assert slots.seeds.dtype == np.uint64
    slots.move(np.array([1, 0]), np.array([0, 1]))
    assert slots.counts[:2].tolist() == [2, 1]
    assert slots.token_ids[:2].tolist() == [[4, 5, 6], [1, 2, 3]]
