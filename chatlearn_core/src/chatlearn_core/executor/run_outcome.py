"""The end of a run: what is saved, ``summary.json``, and the report of a failure to observers."""

from __future__ import annotations

import time
from typing import Any

from chatlearn_core.exceptions import (
    BackendError,
    BackendTimeoutError,
    ChatLearnError,
    CheckpointError,
    Interrupted,
)
from chatlearn_core.executor.assembly import Assembly
from chatlearn_core.executor.checkpointing import CheckpointWriter
from chatlearn_core.executor.journal import Journal
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.run_state import RunState
from chatlearn_core.executor.summary import before_and_after, versions
from chatlearn_core.metrics.run_directory import FAILURE_PAGE
from chatlearn_core.plugins.hookspec import RunStatus
from chatlearn_core.plugins.observers import Observers
from chatlearn_core.types import RunFailure

_PHASES_OF = {
    "generator": (Phase.GENERATING,),
    "environment": (Phase.GENERATING,),
    "reward": (Phase.SCORING,),
    "trainer": (Phase.COMPUTING, Phase.UPDATING),
}
"""Kind of role -> its phases that may overlap with other roles' phases."""


class RunOutcome:
    """Ends a run as completed, interrupted or failed; in each case writes ``summary.json``."""

    def __init__(
        self, assembly: Assembly, journal: Journal, observers: Observers, checkpoint_writer: CheckpointWriter
    ) -> None:
        self.assembly = assembly
        self.journal = journal
        self.directory = journal.directory
        self.observers = observers
        self.checkpoint_writer = checkpoint_writer
        self.outcome: tuple[RunStatus, dict[str, Any]] | None = None
        """The run's status and the content of ``summary.json``; None if the summary could not be written."""
        self._started = time.monotonic()

    def completed(self, state: RunState, model: str | None) -> dict[str, Any]:
        """All steps are done; returns the summary."""
        return self._write_summary("completed", state, model=model)

    async def interrupted(self, state: RunState) -> Interrupted:
        """Save the last complete step, and say how to resume."""
        kept = await self._rescue(state)
        self._record("interrupted", state, "stopped on request")
        return Interrupted(f"stopped after step {state.step}. {kept} Run the same command again to continue")

    async def failed(self, state: RunState, error: Exception) -> None:
        """Save the last complete step, and report the error to observers, the log and ``summary.json``."""
        phase, step = self._phase_of(error), self.journal.step
        phase_s = self.journal.seconds_in(phase)
        self.journal.forget()  # saving is a phase, too
        kept = await self._rescue(state, hangs=_is_timeout(error), unsaved=isinstance(error, CheckpointError))
        failure = RunFailure(
            name=self.assembly.config.name,
            phase=str(phase),
            phase_s=phase_s,
            step=step,
            num_complete=state.step,
            planned_steps=self.assembly.config.train.steps,
            kept=kept,
            run_dir=self.directory.path,
            events=tuple(self.journal.recent),
            wall_s=time.monotonic() - self._started,
            versions=versions(self.assembly.registry),
        )
        self.observers.error(error, failure)
        page = self.directory.path / FAILURE_PAGE
        where = f" What happened, and how to continue: {page}" if page.exists() else ""
        self.journal.say(f"the run failed after step {state.step}. {kept}{where}")
        self._record("failed", state, f"{type(error).__name__}: {error}", phase=str(phase), kept=kept)

    def _phase_of(self, error: Exception) -> Phase:
        """The phase in progress; if phases overlapped, one of the role that failed."""
        place = error.place if isinstance(error, BackendError) else None
        role = self.assembly.config.roles.get(place.role) if place is not None else None
        own = _PHASES_OF[role.kind] if role is not None else ()
        return next((phase for phase in reversed(self.journal.phases) if phase in own), self.journal.phase)

    def _record(self, status: RunStatus, state: RunState, error: str, **facts: str) -> None:
        """Record how the run ended; the disk that this is written to may itself be the cause of the failure."""
        try:
            name = "error" if status == "failed" else status
            self.journal.record(name, step=state.step, error=error, **facts)
            self._write_summary(status, state, error=error)
        except ChatLearnError as unwritten:
            self.journal.listener.warning(f"how the run ended could not be recorded: {unwritten}")

    async def _rescue(self, state: RunState, *, hangs: bool = False, unsaved: bool = False) -> str:
        """Save the last completed step if it is still in memory; returns a sentence on what can be resumed.

        Args:
            hangs: a role did not answer in time, so saving would wait behind the hanging call for another timeout.
            unsaved: the failure was that of a checkpoint, whose cause is already reported.
        """
        lost = ""
        try:
            await self.checkpoint_writer.settle()
        except ChatLearnError as error:
            lost = f"The checkpoint in flight could not be written ({error}). "
        if state.step > state.saved_step and state.step > 0 and not state.policy_changed:
            if hangs:
                lost = f"Step {state.step} could not be saved, since a call still hangs. "
            else:
                try:
                    await self.checkpoint_writer.save(state)
                except ChatLearnError as error:
                    lost = f"Step {state.step} could not be saved{' at a second try' if unsaved else f' ({error})'}. "
        if state.saved_path is not None:
            return f"{lost}A checkpoint of step {state.saved_step} is in {state.saved_path.parent}."
        if lost:
            return f"{lost}There is no checkpoint, so the run starts from the beginning."
        return "No step was complete yet, so it starts from the beginning."

    def _write_summary(
        self, status: RunStatus, state: RunState, *, model: str | None = None, error: str | None = None
    ) -> dict[str, Any]:
        config = self.assembly.config
        best = max(
            (c for c in self.checkpoint_writer.store.complete() if c.metric is not None),
            key=lambda c: (c.metric, c.step),
            default=None,
        )
        content = {
            "name": config.name,
            "status": status,
            "steps": state.step,
            "planned_steps": config.train.steps,
            **before_and_after(state.before, state.after),
            "totals": dict(state.totals),
            "best": {"step": best.step, config.checkpoint.metric: best.metric} if best else None,
            "model": model,
            "checkpoint": str(state.saved_path) if state.saved_path is not None else None,
            "wall_s": round(time.monotonic() - self._started, 3),
            "error": error,
            "versions": versions(self.assembly.registry),
        }
        self.outcome = (status, content)
        self.directory.write_json("summary.json", content)
        return content


def _is_timeout(error: BaseException) -> bool:
    """Whether a role's executor is blocked: a call, possibly that of a checkpoint, did not return in time."""
    return isinstance(error, BackendTimeoutError) or (
        isinstance(error, CheckpointError) and isinstance(error.__cause__, BackendTimeoutError)
    )
