"""How often Python looks for reference cycles in the process that drives a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

ALLOCATIONS = 100_000
"""New containers before a look at the youngest. A step of 100,000 samples makes millions that all stay until it ends;
with Python's default of 700 the looking took as long as the rest of the driver's work."""


@contextmanager
def garbage_collected_seldom() -> Iterator[None]:
    """While a run is made: what is there already is not looked at, and what is new less often."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
