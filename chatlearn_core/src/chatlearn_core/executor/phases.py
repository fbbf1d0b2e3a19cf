"""What a run can be doing: the one list that listeners, messages and the tests of faults go by."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """A part of a run. Its value is the word that people read.

    Phases overlap: within a step ``generating``, ``scoring`` and ``computing``, since work streams sample by sample;
    where rollouts are made ahead, these and ``updating``. Every phase has a test that kills every kind of process in it
    (``plugins/chatlearn_ray/tests/test_fault_grid.py``); a new one is added there too, or that test fails.
    """

    STARTING = "starting"
    """Processes are started and roles set up."""
    RESTORING = "restoring"
    """Trainers load the checkpoint that the run goes on from."""
    GENERATING = "generating"
    """Generators sample completions."""
    SCORING = "scoring"
    """Rewards judge them."""
    COMPUTING = "computing"
    """Trainers compute log-probabilities, values or scores of the samples."""
    UPDATING = "updating"
    """Trainers make optimizer steps."""
    SYNCING = "syncing"
    """The generators take the trainer's weights."""
    EVALUATING = "evaluating"
    """The held-out prompts are sampled and judged."""
    SAVING = "saving"
    """A checkpoint is written."""
    EXPORTING = "exporting"
    """The model directory is written."""
    RECOVERING = "recovering"
    """A trainer that lost a rank is rebuilt."""
    CLOSING = "closing"
    """Everything is closed."""
