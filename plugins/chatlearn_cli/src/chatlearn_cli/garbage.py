"""Frequency of Python's cyclic garbage collection in the driver process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

ALLOCATIONS = 100_000
"""New containers before a collection of the youngest generation. A step of 100,000 samples makes millions that all live
until it ends; with Python's default of 700, collections took as long as the rest of the driver's work."""


@contextmanager
def garbage_collected_seldom() -> Iterator[None]:
    """During a run, exempt existing objects from collection and collect new ones less often."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
