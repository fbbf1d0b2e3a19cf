"""A run from start to end: where it starts, its steps, recovery after a loss, and how it ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from chatlearn_core.config.recorded import recorded_values
from chatlearn_core.config.show import to_yaml
from chatlearn_core.exceptions import ChatLearnError, TrainerLostError
from chatlearn_core.executor.assembly import Assembly
from chatlearn_core.executor.cache_filling import fill_cache
from chatlearn_core.executor.cached_calls import CachedCalls
from chatlearn_core.executor.checkpoint import Checkpoint, CheckpointStore
from chatlearn_core.executor.checkpointing import CheckpointWriter
from chatlearn_core.executor.component_factory import (
    LoopParts,
    build_colocation,
    build_evaluators,
    build_policy_updater,
    build_rollout_buffer,
    build_rollout_producer,
    build_runtime,
)
from chatlearn_core.executor.decisions import build_decisions, build_sampler
from chatlearn_core.executor.device_sharing import DeviceUse
from chatlearn_core.executor.journal import Journal
from chatlearn_core.executor.loggers import build_loggers
from chatlearn_core.executor.output_cache import OutputCache
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.progress import RunListener
from chatlearn_core.executor.refresh import RoleRefresher
from chatlearn_core.executor.resume import (
    BRANCHED_FROM,
    ResumeMode,
    find_resume_point,
    fixed_layout,
    is_foreign,
    layout_settings,
    lock_run_directory,
)
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.rollouts.pending import num_samples
from chatlearn_core.executor.rollouts.saved import load_rollouts
from chatlearn_core.executor.run_outcome import RunOutcome
from chatlearn_core.executor.run_state import RunState
from chatlearn_core.executor.started_roles import started_assembly
from chatlearn_core.executor.step_samples import samples_of
from chatlearn_core.executor.training_loop import TrainingLoop
from chatlearn_core.executor.weight_sync_manager import WeightSyncManager
from chatlearn_core.metrics import RunDirectory, Timers
from chatlearn_core.metrics.run_directory import FAILURE_PAGE
from chatlearn_core.plugins.exits import exit_called
from chatlearn_core.plugins.observers import Observers
from chatlearn_core.runtime.plan import RunPlan


class Run:
    """One training run.

    Args:
        assembly: the checked parts.
        listener: receives the run's progress.
        observers: plugins' observing hooks.
    """

    def __init__(
        self, assembly: Assembly, *, listener: RunListener | None = None, observers: Observers | None = None
    ) -> None:
        self.assembly = assembly
        self.config = assembly.config
        self.listener = listener or RunListener()
        self.observers = observers or Observers()
        self.sampler = build_sampler(assembly.loaded, assembly.registry, assembly.train_set.datasets)
        self.decisions = build_decisions(assembly.loaded, assembly.registry)
        self.state = RunState({"sampler": self.sampler, "decisions": self.decisions, "algorithm": assembly.algorithm})
        self._settings: dict[str, Any] = recorded_values(assembly.loaded)

    async def train(
        self, resume: ResumeMode | Path = "auto", *, rewind: bool = False, command: str | None = None
    ) -> dict[str, Any]:
        """Train to the end, from the beginning or from a checkpoint; returns the content of ``summary.json``.

        Args:
            resume: see ``find_resume_point``.
            rewind: whether checkpoints newer than the starting one may be deleted.
            command: the command that starts this run, for messages.

        Raises:
            Interrupted: stopped on request; the run can be resumed.
            ChatLearnError: the cause of failure; the run can be resumed unless the message says otherwise.
        """
        self.directory = RunDirectory(self.assembly.plan.run_dir)
        self.journal = Journal(self.directory, self.listener)
        with lock_run_directory(self.directory.path):
            self.store = CheckpointStore(
                self.directory.checkpoints,
                keep_last=self.config.checkpoint.keep_last,
                keep_best=self.config.checkpoint.keep_best,
            )
            self.directory.remove_unfinished()
            self.store.remove_unfinished()
            self._may_delete = rewind
            point = find_resume_point(
                self.store,
                resume,
                self._settings,
                self.config.train.steps,
                has_metrics=self.directory.metrics_file.exists(),
                is_complete=self._ended_well(),
                may_change=layout_settings(self._all_roles()),
                fixed=fixed_layout(self._all_roles()),
                rewind=rewind,
                command=command or f"chatlearn run {self.assembly.loaded.source}",
                branched_from=self.directory.read_text(BRANCHED_FROM),
            )
            if point.checkpoint is not None and is_foreign(point.checkpoint, self.store):
                self.directory.write_text(BRANCHED_FROM, str(point.checkpoint.path.resolve()))
            for note in point.notes:
                self.journal.say(note, "resume", note=note)
            self._write_static_files()
            self._build()
            if point.checkpoint is not None:
                self.state.take_over(point.checkpoint)
            self.observers.run_start(self._settings, self.directory.path, self.assembly.graph)
            try:
                self.loggers.start(self._settings)
                timers = Timers()
                with self.journal.during(Phase.STARTING, self.state.step):
                    if self.cached is not None:
                        left = self.config.train.steps - self.state.step
                        said = await fill_cache(self.cached, self.assembly, self.sampler.state_dict(), left, timers)
                        self.journal.say(said, "output_cache", note=said)
                    await self.colocation.start(timers)
                for sync in self.weight_sync.started_routes:
                    flow = {"trainer": sync.trainer, "generator": sync.target, "channel": sync.channel}
                    self.journal.record("weight_sync", backend=sync.record.name, why=sync.why, **flow)
                self.listener.started(self.directory.path, self.config.train.steps, self.state.step + 1)
                return await self._train_through_losses(point.checkpoint, timers)
            except asyncio.CancelledError:
                raise await self.run_outcome.interrupted(self.state) from None
            except Exception as error:
                await self.run_outcome.failed(self.state, error)
                raise
            except SystemExit as error:
                failure = exit_called(error, self.assembly.registry)
                await self.run_outcome.failed(self.state, failure)
                raise failure from error
            finally:
                await self._close()

    def _all_roles(self) -> RunPlan:
        """The plan, with roles that are closed before the run's own start."""
        plan, kept = self.assembly.plan, self.assembly.cached_roles
        return replace(plan, roles={**kept, **plan.roles}) if kept else plan

    def _ended_well(self) -> bool:
        """Whether the directory holds this very run, complete: its last step is done and its model exported."""
        earlier = self.directory.read_summary()
        return earlier.get("status") == "completed" and earlier.get("planned_steps") == self.config.train.steps

    def _write_static_files(self) -> None:
        self.directory.remove(FAILURE_PAGE)  # from an earlier failure of this run
        self.directory.write_text("config.yaml", to_yaml(self._settings))
        for warning in self.assembly.loaded.warnings:
            self.journal.warn(warning, "configuration", warning=warning)
        for dataset in [*self.assembly.train_set.reports, *self.assembly.eval_reports]:
            if dataset.is_notable:
                self.journal.warn(str(dataset), "data", report=str(dataset))

    def _build(self) -> None:
        plan, started = self.assembly.plan, started_assembly(self.assembly)
        kept = self.assembly.cached_roles
        self.cached = CachedCalls(OutputCache(plan.run_dir), kept) if kept else None
        self.runtime = build_runtime(started)
        self.runtime.on_event = self.journal.runtime_event
        self.colocation = build_colocation(started, self.runtime)
        rollouts = Rollouts(
            self.runtime,
            self.config.rollout,
            self.assembly.plan.roles,
            count_tokens=self.listener.sampled if self.listener.counts_tokens else None,
        )
        self.parts = LoopParts(self.assembly, self.runtime, rollouts, self.colocation, self.journal.during, self.cached)
        self.producer = build_rollout_producer(self.parts, self.sampler, self.decisions, self.state)
        self.buffer = build_rollout_buffer(self.assembly)
        self.weight_sync = WeightSyncManager(
            self.runtime, plan.weight_syncs, self.colocation, self.observers, started=started.plan.weight_syncs
        )
        self.loggers = build_loggers(self.assembly, self.directory.path, self.journal.warn)
        self.refresher = RoleRefresher(self.runtime, plan.roles, self.colocation, plan.run_dir / "refresh")
        self.checkpoint_writer = CheckpointWriter(
            self.store,
            self.runtime,
            (*self.assembly.learning.learners, *self.refresher.roles),
            self._settings,
            self.config.checkpoint.metric,
            self.journal,
            self.observers,
            self.colocation,
        )
        self.run_outcome = RunOutcome(self.assembly, self.journal, self.observers, self.checkpoint_writer)
        self.loop = TrainingLoop(
            self.config,
            self.state,
            self.assembly.algorithm,
            self.decisions,
            self.producer,
            self.buffer,
            build_policy_updater(self.parts, self.decisions),
            self.weight_sync,
            self.refresher,
            build_evaluators(self.parts),
            self.checkpoint_writer,
            self.loggers,
            self.journal,
            self.observers,
        )

    async def _train_through_losses(self, checkpoint: Checkpoint | None, timers: Timers) -> dict[str, Any]:
        """Train to the end; after a trainer lost a rank and was rebuilt, continue from the last checkpoint.

        Args:
            timers: those of the start, for the trace.

        Raises:
            TrainerLostError: the trainer has no restarts left.
        """
        lost: TrainerLostError | None = None
        while True:
            if lost is not None:
                self.state.policy_changed = True  # the other ranks' weights match no completed step
                timers = Timers()
                self.journal.forget()
                with self.journal.during(Phase.RECOVERING):
                    await self.colocation.recover(lost, timers)
            try:
                if lost is None:
                    await self._restore(checkpoint, timers, during="start")
                else:
                    await self._go_back(lost, timers)
                await self.loop.run()
                return await self._finish()
            except TrainerLostError as error:
                lost = error

    async def _restore(self, checkpoint: Checkpoint | None, timers: Timers, during: str) -> None:
        """Restore every role from the checkpoint, and sync the trainer's weights to every generator.

        Args:
            timers: their content, with this call's additions, is written to the trace under ``during``.
        """
        await self.producer.close()  # rollouts still in the generators do not belong to the checkpoint
        self.producer.pending = ()
        self.buffer.clear()
        if checkpoint is not None:
            await self.checkpoint_writer.load(checkpoint, timers)
            saved = load_rollouts(checkpoint.path, self.assembly.train_set, self.producer.requests_of)
            self.producer.pending = saved.pending
            self.buffer.load_state_dict(saved.buffer, saved.requests_of)
        if self._may_delete:
            self._say_what_is_removed()
            self.store.forget_after(self.state.step)
            self._may_delete = False
        for path in self.store.set_aside_after(self.state.step):
            text = f"a damaged checkpoint was passed over and is now {path}; delete it when you do not need it any more"
            self.journal.say(text, "set_aside", path=str(path))
        for text in self.directory.rewind(self.state.step if checkpoint else -1):
            self.journal.warn(text)
        with self.journal.during(Phase.SYNCING, self.state.step):
            await self.weight_sync.republish(self.state, timers)
        await self.producer.updates_done()
        self.directory.append_trace(self.state.step, timers, during)

    def _say_what_is_removed(self) -> None:
        """Announce the removal of checkpoints newer than the starting one, and of their metrics: these steps are
        repeated, possibly with other settings.
        """
        step = self.state.step
        checkpoints = self.store.steps_after(step)
        if not checkpoints:
            return  # every resumed run repeats the steps since its last checkpoint
        metrics = [line["step"] for line in self.directory.read_metrics() if line["step"] > step]
        text = f"removing checkpoints newer than step {step}, of step {', '.join(map(str, checkpoints))}"
        if metrics:
            text += f", and metrics and rollouts of steps {min(metrics)} to {max(metrics)}"
        self.journal.say(text, "removed", step=step, checkpoints=checkpoints, metrics=metrics)

    async def _go_back(self, lost: TrainerLostError, timers: Timers) -> None:
        """Rebuild the trainer and return to the last checkpoint. A rank that dies meanwhile is another loss."""
        with suppress(ChatLearnError):
            await self.checkpoint_writer.settle()  # of the lost ranks
        checkpoint, problems = self.checkpoint_writer.last(self.state)
        if checkpoint is not None:
            self.state.take_over(checkpoint)
        else:
            self.state.begin_again()
            await self.refresher.begin_anew(self.assembly.learning.learners, timers)
        await self._restore(checkpoint, timers, during="recovery")
        self.state.policy_changed = False
        at = f"step {self.state.step}" if checkpoint is not None else "the beginning"
        self.journal.warn(
            "; ".join([f"{lost}. The trainer was rebuilt; training continues from {at}", *problems]),
            "trainer_lost",
            step=self.state.step,
            error=str(lost),
        )

    async def _finish(self) -> dict[str, Any]:
        if left := num_samples(self.producer.pending) + len(samples_of(self.buffer.groups)):
            text = f"{left} samples were not trained on by the last step; they are in its checkpoint, and continue if "
            self.journal.say(f"{text}train.steps is raised", "unfinished", step=self.state.step, samples=left)
        model = None
        role = self.assembly.home  # the policy, or the reward model that a run trains
        if self.config.checkpoint.export:
            timers = Timers()
            with self.journal.during(Phase.EXPORTING):
                async with self.colocation.lease(DeviceUse(role, "export"), timers=timers):
                    with self.directory.replacing_model() as aside, timers.measure("export", role=role):
                        await self.runtime.trainer(role).export_model(aside)
            self.directory.append_trace(self.state.step, timers, during="export")
            model = str(self.directory.model)
        return self.run_outcome.completed(self.state, model)

    async def _close(self) -> None:
        """Close everything and announce the end; failures while closing do not change the run's outcome."""
        self.journal.forget()
        with self.journal.during(Phase.CLOSING):
            self.loggers.close()
            await self.producer.close()
            self.parts.close()
            try:
                await self.runtime.close()
            except ChatLearnError as error:
                self.listener.warning(str(error))
            if self.cached is not None:
                self.cached.cache.close()
        if self.run_outcome.outcome is not None:
            self.observers.run_end(*self.run_outcome.outcome)
            self.listener.finished(self.run_outcome.outcome[1])
