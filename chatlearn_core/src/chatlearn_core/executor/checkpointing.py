"""Checkpoints of a run: always finished once begun, and found again when a trainer must go back to one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chatlearn_core.exceptions import CheckpointError
from chatlearn_core.executor.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from chatlearn_core.executor.colocation import ColocationManager
from chatlearn_core.executor.device_sharing import DeviceUse
from chatlearn_core.executor.journal import Journal
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.rollouts.saved import save_rollouts
from chatlearn_core.executor.run_state import RunState
from chatlearn_core.metrics import Timers
from chatlearn_core.plugins.observers import Observers
from chatlearn_core.plugins.sources import did_you_mean
from chatlearn_core.protocols import BackgroundSavingGroup, Runtime
from chatlearn_core.types import FileFacts

_NO_ACCURACY = {
    "eval/accuracy": "; the rewards of this run have no component accuracy: set checkpoint.metric to eval/reward"
}
"""Hints for metrics that only some rewards provide."""


@dataclass(slots=True)
class CheckpointWriter:
    """Writes checkpoints of the trained roles and of the executor's own state."""

    store: CheckpointStore
    """The run's checkpoints on disk."""
    runtime: Runtime
    """Hosts the roles."""
    roles: tuple[str, ...]
    """The trained roles."""
    settings: Mapping[str, Any]
    """The resolved configuration."""
    metric: str
    """Name of the metric that ranks checkpoints (``checkpoint.metric``)."""
    journal: Journal
    observers: Observers
    colocation: ColocationManager
    """Leases devices to roles that share them."""
    _unranked_told: bool = False
    _in_flight: asyncio.Task[None] | None = None
    """Writes the files of the last checkpoint, after all of its content was copied."""

    async def save(self, state: RunState, *, background: bool = False) -> None:
        """Write a checkpoint of the last completed step. Once begun it is finished, even if the run is stopped.

        Args:
            background: return as soon as trainers that can do so have copied their state.

        Raises:
            CheckpointError: the disk cannot be written, for this checkpoint or the one in flight.
            TrainerLostError: a rank died while writing; nothing of the checkpoint remains.
        """
        await self.settle()
        await _finished(asyncio.create_task(self._write(state, background)))

    async def settle(self, *, only_if_done: bool = False) -> None:
        """Wait for the checkpoint in flight, if there is one. Raises what ``save`` raises."""
        if self._in_flight is not None and (self._in_flight.done() or not only_if_done):
            writing, self._in_flight = self._in_flight, None
            with self.journal.during(Phase.SAVING):
                await _finished(writing)

    async def _write(self, state: RunState, background: bool) -> None:
        """Write everything; in the background what was copied."""
        self._warn_of_no_rank(state)
        timers, step = Timers(), state.step
        with self.journal.during(Phase.SAVING, step), contextlib.ExitStack() as stack:
            facts: dict[str, FileFacts] = {}
            content = state.content(self.settings, self.metric)
            directory = stack.enter_context(self.store.write(step, content, facts))
            begun: dict[str, BackgroundSavingGroup] = {}
            for role in self.roles:
                group, target = self.runtime.trainer(role), directory / "roles" / role
                async with self.colocation.lease(DeviceUse(role, "save"), timers=timers):
                    with timers.measure("save", role=role):
                        if background and isinstance(group, BackgroundSavingGroup) and await group.begin_save(target):
                            begun[role] = group
                        else:
                            facts |= _below(role, await group.save(target))
            buffered: Mapping[str, Any] = {"groups": []}
            if state.buffered is not None:
                buffered = (await state.buffered.with_values(self.runtime.data)).state_dict()
            save_rollouts(directory, state.pending, buffered)
            self.journal.directory.make_durable()
            sealing = stack.pop_all()

            async def finish() -> None:
                with sealing:
                    for name, one in begun.items():
                        facts.update(_below(name, await one.finish_save()))
                    # Computing checksums and flushing many gigabytes would block the event loop.
                    await asyncio.to_thread(sealing.pop_all().close)
                state.saved_step, state.saved_path = step, self.store.path_of(step)
                self.observers.checkpoint_saved(step, state.saved_path)
                self.journal.directory.append_trace(step, timers, during="checkpoint")

            if background:
                self._in_flight = asyncio.create_task(finish())
            else:
                await finish()

    def _warn_of_no_rank(self, state: RunState) -> None:
        """Warn once if the metric that ranks checkpoints does not exist: only a run knows which metrics it has."""
        known = {**state.before, **state.after, **state.line}
        not_measured_yet = self.metric.startswith("eval/") and not any(name.startswith("eval/") for name in known)
        if self._unranked_told or self.store.keep_best == 0 or self.metric in known or not_measured_yet:
            return
        self._unranked_told = True
        self.journal.warn(
            f"checkpoint.metric is {self.metric!r}, and this run has no such metric: checkpoint.keep_best keeps none."
            f"{did_you_mean(self.metric, sorted(known))} It is a name of metrics.jsonl"
            f"{_NO_ACCURACY.get(self.metric, '')}"
        )

    async def load(self, checkpoint: Checkpoint, timers: Timers) -> None:
        """Restore every trained role from the checkpoint."""
        with self.journal.during(Phase.RESTORING, checkpoint.step):
            for role in self.roles:
                async with self.colocation.lease(DeviceUse(role, "load"), timers=timers):
                    with timers.measure("load", role=role):
                        await self.runtime.trainer(role).load(checkpoint.path / "roles" / role)

    def last(self, state: RunState) -> tuple[Checkpoint | None, list[str]]:
        """The checkpoint that this run last saved or started from, which may be in another run's directory; if it is
        damaged, the newest of this run's own, with the problems of the skipped ones.
        """
        if state.saved_path is None:
            return None, []
        try:
            return read_checkpoint(state.saved_path), []
        except CheckpointError as error:
            checkpoint, problems = self.store.newest()
            return checkpoint, list(dict.fromkeys([str(error), *problems]))


def _below(role: str, facts: Mapping[str, FileFacts]) -> dict[str, FileFacts]:
    return {f"roles/{role}/{name}": one for name, one in facts.items()}


async def _finished(writing: asyncio.Task[None]) -> None:
    """Wait for a task that is finished even if the run is stopped."""
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await writing
        raise
