"""Numbers about a run: how they are timed, merged, written and shown."""

from chatlearn_core.metrics.run_directory import RunDirectory
from chatlearn_core.metrics.timers import Timers

__all__ = ["RunDirectory", "Timers"]
