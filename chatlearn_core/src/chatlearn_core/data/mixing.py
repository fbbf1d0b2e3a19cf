"""In which turn each of several datasets is drawn from, so that their shares are exact at every moment."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def shares(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """Exact shares that sum to 1. A weight counts as the decimal number it is written as: 0.1 is a tenth."""
    exact = [Fraction(repr(weight)) for weight in weights]
    return tuple(weight / sum(exact) for weight in exact)


def next_dataset(shares: Sequence[Fraction], drawn: Sequence[int]) -> int:
    """Index of the dataset that the next example comes from, after ``drawn[i]`` examples of dataset i.

    The rule of R. Tijdeman, "The chairman assignment problem" (Discrete Mathematics 32, 1980): with k datasets,
    after any number t of draws from the start, dataset i was drawn ``shares[i] * t`` times, off by at most
    ``1 - 1/(2k - 2)``: never by a whole example. Among the datasets that may be drawn without running ahead of their
    share, the one that would fall behind first is drawn.
    """
    if len(shares) == 1:
        return 0
    slack = Fraction(1, 2 * len(shares) - 2)
    turn = sum(drawn) + 1
    eligible = [i for i, share in enumerate(shares) if share * turn - drawn[i] >= slack]
    return min(eligible, key=lambda i: ((drawn[i] + 1 - slack) / shares[i], i))
