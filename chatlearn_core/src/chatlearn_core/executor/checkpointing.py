"""Checkpoints of a run: always finished once begun, and found again when a trainer must go back to one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
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
from chatlearn_core.protocols import Runtime
from chatlearn_core.types import FileFacts

_NO_ACCURACY = {
    "eval/accuracy": "; the rewards of this run have no component accuracy: set checkpoint.metric to eval/reward"
}
"""Hints for metrics that only some rewards provide."""


class CheckpointWriter:
    """Writes checkpoints of the trained roles and of the executor's own state.

    Args:
        store: the run's checkpoints on disk.
        runtime: hosts the roles.
        roles: the trained roles.
        settings: the resolved configuration.
        metric: name of the metric that ranks checkpoints (``checkpoint.metric``).
        colocation: leases devices to roles that share them.
    """

    def __init__(
        self,
        store: CheckpointStore,
        runtime: Runtime,
        roles: Iterable[str],
        settings: Mapping[str, Any],
        metric: str,
        journal: Journal,
        observers: Observers,
        colocation: ColocationManager,
    ) -> None:
        self.store = store
        self.runtime = runtime
        self.roles = tuple(roles)
        self.settings = settings
        self.metric = metric
        self.journal = journal
        self.observers = observers
        self.colocation = colocation
        self._unranked_told = False

    async def save(self, state: RunState) -> None:
        """Write a checkpoint of the last completed step. Once begun it is finished, even if the run is stopped.

        Raises:
            CheckpointError: the disk cannot be written.
            TrainerLostError: a rank died while writing; nothing of the checkpoint remains.
        """
        writing = asyncio.ensure_future(self._write(state))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await writing
            raise

    async def _write(self, state: RunState) -> None:
        self._warn_of_no_rank(state)
        timers = Timers()
        with self.journal.during(Phase.SAVING, state.step), contextlib.ExitStack() as stack:
            facts: dict[str, FileFacts] = {}
            content = state.content(self.settings, self.metric)
            directory = stack.enter_context(self.store.write(state.step, content, facts))
            for role in self.roles:
                async with self.colocation.lease(DeviceUse(role, "save"), timers=timers):
                    with timers.measure("save", role=role):
                        saved = await self.runtime.trainer(role).save(directory / "roles" / role)
                facts |= {f"roles/{role}/{name}": one for name, one in saved.items()}
            buffered: Mapping[str, Any] = {"groups": []}
            if state.buffered is not None:
                buffered = (await state.buffered.with_values(self.runtime.data)).state_dict()
            save_rollouts(directory, state.pending, buffered)
            self.journal.directory.make_durable()
            # Computing checksums and flushing many gigabytes would block the event loop.
            await asyncio.to_thread(stack.pop_all().close)
        state.saved_step, state.saved_path = state.step, self.store.path_of(state.step)
        self.observers.checkpoint_saved(state.step, state.saved_path)
        self.journal.directory.append_trace(state.step, timers, during="checkpoint")

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
