from __future__ import annotations

import pytest

from chatlearn_core.batching.efficiency import packing_efficiency, padding_efficiency

LENGTHS = [10, 30, 20, 5]


def test_packing_by_hand():
    assert packing_efficiency(LENGTHS, [[0, 1], [2, 3], []], 40) == pytest.approx(65 / 80)


def test_an_oversized_micro_batch_is_full():
    assert packing_efficiency([100, 10], [[0], [1]], 40) == pytest.approx(110 / 140)


def test_padding_by_hand():
    assert padding_efficiency(LENGTHS, 2) == pytest.approx(65 / (60 + 40))
    assert padding_efficiency(LENGTHS, 4) == pytest.approx(65 / 120)


def test_nothing_is_efficient():
    assert packing_efficiency([], [], 40) == 1.0
    assert padding_efficiency([], 4) == 1.0
