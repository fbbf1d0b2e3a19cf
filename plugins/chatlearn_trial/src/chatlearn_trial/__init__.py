"""Runs code of others in processes of their own first, to see whether it hangs, ends the process or changes its state.

A library: it registers nothing, imports only the standard library, and knows nothing of training.
"""

from chatlearn_trial.files import files_of
from chatlearn_trial.memory import Memory
from chatlearn_trial.outcome import Outcome
from chatlearn_trial.plain_values import packed, unpacked
from chatlearn_trial.remembered import key_of, outcomes
from chatlearn_trial.settings import cache_file, seconds
from chatlearn_trial.trial import Task, try_apart

__all__ = [
    "Memory",
    "Outcome",
    "Task",
    "cache_file",
    "files_of",
    "key_of",
    "outcomes",
    "packed",
    "seconds",
    "try_apart",
    "unpacked",
]
