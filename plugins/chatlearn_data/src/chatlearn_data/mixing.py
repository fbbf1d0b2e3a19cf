"""The order in which several datasets are drawn from, so that their shares are exact at every moment."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def shares(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """Exact shares that sum to 1. A weight counts as the decimal number written: 0.1 is exactly a tenth."""
    exact = [Fraction(repr(weight)) for weight in weights]
    return tuple(weight / sum(exact) for weight in exact)


def next_dataset(shares: Sequence[Fraction], drawn: Sequence[int]) -> int:
    """Index of the dataset to draw the next example from, after ``drawn[i]`` examples of dataset i.

    The rule of R. Tijdeman, "The chairman assignment problem" (Discrete Mathematics 32, 1980): with k datasets,
    after any number t of draws, dataset i was drawn ``shares[i] * t`` times with an error of at most ``1 - 1/(2k -
    2)``, always less than a whole example. Among the datasets that can be drawn without exceeding their share, the rule
    draws the one that would fall behind first.
    """
    if len(shares) == 1:
        return 0
    slack = Fraction(1, 2 * len(shares) - 2)
    turn = sum(drawn) + 1
    eligible = [i for i, share in enumerate(shares) if share * turn - drawn[i] >= slack]
    return min(eligible, key=lambda i: ((drawn[i] + 1 - slack) / shares[i], i))
