"""How much the suites draw: as usual, or more and with other seeds in later rounds of ``plugins check --stress``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "CHATLEARN_STRESS_ROUND"
"""Environment variable with the number of the round; 0 or unset is the usual form."""
MORE = 4
"""Draws of a later round, as a multiple of the usual number."""
_APART = 1_000_003
"""Distance of the seeds of two rounds: more than any test draws."""


def stress_round() -> int:
    """Return the number of the round."""
    return int(os.environ.get(VARIABLE, "0"))


@contextmanager
def in_round(number: int) -> Iterator[None]:
    """Run the suites that this process or its children start inside the block in a round of this number."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(number)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def seeds(usual: int) -> range:
    """Return the seeds of a test that usually draws ``usual`` times: other ones, and more, in each later round."""
    number = stress_round()
    start = number * _APART
    return range(start, start + (MORE * usual if number else usual))


def first_seed(usual: int) -> int:
    """Return the seed of a test that needs one."""
    return usual + stress_round() * _APART
