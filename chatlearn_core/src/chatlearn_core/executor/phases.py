"""The phases of a run: the single list that listeners, messages and fault tests use."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """A part of a run. Its value is the word shown to users.

    Phases overlap: within a step ``generating``, ``scoring`` and ``computing``, because work streams sample by sample;
    if rollouts are made ahead, these and ``updating``. Every phase has a test that kills every kind of process in it
    (``plugins/chatlearn_ray/tests/test_fault_grid.py``), which fails if a phase is missing there.
    """

    STARTING = "starting"
    """Processes start and roles are set up."""
    RESTORING = "restoring"
    """Trainers load the checkpoint that the run resumes from."""
    GENERATING = "generating"
    """Generators sample completions."""
    SCORING = "scoring"
    """Rewards score them."""
    COMPUTING = "computing"
    """Trainers compute log-probabilities, values or scores of the samples."""
    UPDATING = "updating"
    """Trainers make optimizer steps."""
    SYNCING = "syncing"
    """The generators load the trainer's weights."""
    EVALUATING = "evaluating"
    """The held-out prompts are sampled and scored."""
    SAVING = "saving"
    """A checkpoint is written."""
    EXPORTING = "exporting"
    """The model directory is written."""
    RECOVERING = "recovering"
    """A trainer that lost a rank is rebuilt."""
    CLOSING = "closing"
    """Everything is closed."""
