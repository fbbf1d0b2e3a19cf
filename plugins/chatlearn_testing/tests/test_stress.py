"""Later rounds draw other seeds, and more of them."""

from __future__ import annotations

from chatlearn_testing.stress import MORE, first_seed, in_round, seeds, stress_round


def test_rounds_share_no_seed() -> None:
    assert (stress_round(), seeds(10), first_seed(3)) == (0, range(10), 3)
    usual = set(seeds(10))
    with in_round(1):
        first = seeds(10)
        assert len(first) == 10 * MORE
        assert first_seed(3) != 3
    with in_round(2):
        assert not set(seeds(10)) & set(first)
    assert not usual & set(first)
    assert stress_round() == 0
