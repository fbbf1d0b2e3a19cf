"""Outcomes of tasks that are remembered, and of the others by trying them."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from chatlearn_trial.memory import Memory
from chatlearn_trial.outcome import Outcome
from chatlearn_trial.trial import Task, try_apart


def key_of(content: Iterable[str]) -> str:
    """The key of a task: identifies everything that its outcome depends on besides imported files."""
    return hashlib.sha256("\0".join(content).encode(errors="surrogateescape")).hexdigest()[:32]


def outcomes(
    function: str, tasks: Mapping[str, Task], *, limit_s: float, memory: Memory, tried_variable: str, lost_s: float
) -> dict[str, Outcome]:
    """The outcome of each task: remembered, or of a trial (``try_apart``), which is then remembered.

    Args:
        function: see ``try_apart``.
        tasks: by ``key_of`` their content.
        limit_s: time limit of each task, seconds.
        memory: holds the outcomes.
        tried_variable: environment variable with the keys that this process or its parent has tried without harm.
            Where the memory has lost their outcomes, they are left out, so that child processes try nothing again.
        lost_s: time for which it is remembered that a task was lost, seconds.
    """
    known = memory.recall()
    tried = {key for key in os.environ.get(tried_variable, "").split(",") if key}
    new = {key: task for key, task in tasks.items() if key not in known and key not in tried}
    if new:
        until = time.time() + lost_s
        found = try_apart(function, new, limit_s=limit_s)
        found = {key: replace(one, until=until) if one.lost else one for key, one in found.items()}
        memory.keep(found)
        known |= found
        tried |= {key for key, one in found.items() if not one.lost and not one.patched}
        os.environ[tried_variable] = ",".join(sorted(tried))
    return {key: known[key] for key in tasks if key in known}
