"""Metrics of a run: timing, merging, and writing them."""

from chatlearn_core.metrics.run_directory import RunDirectory
from chatlearn_core.metrics.timers import Timers

__all__ = ["RunDirectory", "Timers"]
