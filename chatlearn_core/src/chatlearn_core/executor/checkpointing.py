"""Checkpoints of a run: written whole once begun, and found again when a trainer has to go back to one."""

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
"""Said of a metric that only some rewards give."""


class CheckpointWriter:
    """Writes checkpoints of the roles that learn, and of the executor's own state.

    Args:
        store: where they lie.
        runtime: holds the roles.
        roles: those that learn.
        settings: the resolved configuration.
        metric: ranks checkpoints (``checkpoint.metric``).
        colocation: gives leases to roles that share devices.
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
        """Write a checkpoint of the last completed step. Once begun it is finished, also when the run is stopped.

        Raises:
            CheckpointError: the disk does not take it.
            TrainerLostError: a rank died while it wrote; nothing of it is left.
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
            # Checksums and fsync of many gigabytes would hold up everything else that the event loop has to do.
            await asyncio.to_thread(stack.pop_all().close)
        state.saved_step, state.saved_path = state.step, self.store.path_of(state.step)
        self.observers.checkpoint_saved(state.step, state.saved_path)
        self.journal.directory.append_trace(state.step, timers, during="checkpoint")

    def _warn_of_no_rank(self, state: RunState) -> None:
        """Say once that a metric which should rank checkpoints is none: which there are, only a run knows."""
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
        """Bring every role that learns to where the checkpoint was taken."""
        with self.journal.during(Phase.RESTORING, checkpoint.step):
            for role in self.roles:
                async with self.colocation.lease(DeviceUse(role, "load"), timers=timers):
                    with timers.measure("load", role=role):
                        await self.runtime.trainer(role).load(checkpoint.path / "roles" / role)

    def last(self, state: RunState) -> tuple[Checkpoint | None, list[str]]:
        """What this run last saved or began from, which may be in another run's directory; if it is damaged, the newest
        of this run's own, and what is wrong with those passed over.
        """
        if state.saved_path is None:
            return None, []
        try:
            return read_checkpoint(state.saved_path), []
        except CheckpointError as error:
            checkpoint, problems = self.store.newest()
            return checkpoint, list(dict.fromkeys([str(error), *problems]))
