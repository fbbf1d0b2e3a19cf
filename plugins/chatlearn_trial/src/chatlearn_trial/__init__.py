"""Runs code of others in processes of their own first, to see whether it hangs, ends the process or changes its state.

A library: it registers nothing, imports only the standard library, and knows nothing of training.
"""

from chatlearn_trial.files import files_in, files_of, installation_state, summary
from chatlearn_trial.memory import Memory
from chatlearn_trial.outcome import Outcome
from chatlearn_trial.trial import Task, try_apart

__all__ = ["Memory", "Outcome", "Task", "files_in", "files_of", "installation_state", "summary", "try_apart"]
