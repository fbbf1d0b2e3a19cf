"""A run from start to end: experience, training, weight sync, evaluation, checkpoints, and going on after a loss."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatlearn_core.config.recorded import recorded_values
from chatlearn_core.config.show import to_yaml
from chatlearn_core.exceptions import ChatLearnError, TrainerLostError
from chatlearn_core.executor.alarms import Alarms
from chatlearn_core.executor.assembly import Assembly
from chatlearn_core.executor.building import (
    build_environment,
    build_evaluator,
    build_memory,
    build_runtime,
    build_sampler,
    build_trainer,
)
from chatlearn_core.executor.checkpoint import Checkpoint, CheckpointStore
from chatlearn_core.executor.ending import Ending
from chatlearn_core.executor.environment import Experience
from chatlearn_core.executor.failure_page import FAILURE_PAGE
from chatlearn_core.executor.journal import Journal
from chatlearn_core.executor.loggers import build_loggers
from chatlearn_core.executor.metrics_line import epochs, sync_metrics, throughput, values
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.progress import RunListener
from chatlearn_core.executor.resume import (
    BRANCHED_FROM,
    ResumeMode,
    find_resume_point,
    is_foreign,
    layout_settings,
    lock_run_directory,
)
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.rollouts.pending import num_samples
from chatlearn_core.executor.rollouts.saved import load_pending
from chatlearn_core.executor.run_state import RunState
from chatlearn_core.executor.saving import Saver
from chatlearn_core.executor.sharing import Use, sync_uses
from chatlearn_core.flow import to_svg
from chatlearn_core.metrics import RunDirectory, Timers
from chatlearn_core.plugins.exits import exit_called
from chatlearn_core.plugins.observers import Observers
from chatlearn_core.types import Metrics, merge_metrics


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
        self.state = RunState(build_sampler(assembly))
        self._settings: dict[str, Any] = recorded_values(assembly.loaded)

    async def train(
        self, resume: ResumeMode | Path = "auto", *, rewind: bool = False, command: str | None = None
    ) -> dict[str, Any]:
        """Train to the end, or from the newest checkpoint to the end; returns the content of ``summary.json``.

        Args:
            resume: see ``find_resume_point``.
            rewind: whether checkpoints newer than the one to go on from may be deleted.
            command: what starts this run, for messages.

        Raises:
            Interrupted: stopped on request; resumable.
            ChatLearnError: what went wrong, told on ``failure.md``; resumable unless the message says otherwise.
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
                may_change=layout_settings(self.assembly.plan),
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
            self.observers.run_start(self._settings, self.directory.path)
            try:
                self.loggers.start(self._settings)
                self.journal.enter(Phase.STARTING, self.state.step)
                timers = Timers()
                await self.memory.start(timers)
                for sync in self.assembly.plan.weight_syncs:
                    flow = {"trainer": sync.trainer, "generator": sync.generator, "channel": sync.channel}
                    self.journal.record("weight_sync", backend=sync.record.name, why=sync.why, **flow)
                self.listener.started(self.directory.path, self.config.train.steps, self.state.step + 1)
                return await self._train_through_losses(point.checkpoint, timers)
            except asyncio.CancelledError:
                raise await self.ending.interrupted(self.state) from None
            except Exception as error:
                await self.ending.failed(self.state, error)
                raise
            except SystemExit as error:
                failure = exit_called(error, self.assembly.registry)
                await self.ending.failed(self.state, failure)
                raise failure from error
            finally:
                await self._close()

    def _ended_well(self) -> bool:
        """Whether the directory holds this very run, finished: its last steps made and its model exported."""
        earlier = self.directory.read_summary()
        return earlier.get("status") == "completed" and earlier.get("planned_steps") == self.config.train.steps

    def _write_static_files(self) -> None:
        self.directory.remove(FAILURE_PAGE)  # of a run that goes on now
        self.directory.write_text("config.yaml", to_yaml(self._settings))
        self.directory.write_text("flow.svg", to_svg(self.assembly.graph))
        for warning in self.assembly.loaded.warnings:
            self.journal.warn(warning, "configuration", warning=warning)
        evaluated = self.assembly.eval_set.reports if self.assembly.eval_set is not None else ()
        for dataset in [*self.assembly.train_set.reports, *evaluated]:
            if dataset.is_notable:
                self.journal.warn(str(dataset), "data", report=str(dataset))

    def _build(self) -> None:
        self.runtime = build_runtime(self.assembly)
        self.runtime.on_event = self.journal.runtime_event
        self.memory = build_memory(self.assembly, self.runtime)
        rollouts = Rollouts(self.runtime, self.config.rollout, self.assembly.plan.roles)
        self.environment = build_environment(
            self.assembly, self.runtime, rollouts, self.journal.enter, memory=self.memory
        )
        self.trainer = build_trainer(self.assembly, self.runtime, memory=self.memory)
        self.evaluator = build_evaluator(self.assembly, self.runtime, rollouts, memory=self.memory)
        self.loggers = build_loggers(self.assembly, self.directory.path, self.journal.warn)
        metric = self.config.checkpoint.metric
        self.saver = Saver(
            self.store,
            self.runtime,
            self.trainer.losses,
            self._settings,
            metric,
            self.journal,
            self.observers,
            self.memory,
        )
        self.ending = Ending(self.assembly, self.journal, self.observers, self.saver)

    async def _train_through_losses(self, checkpoint: Checkpoint | None, timers: Timers) -> dict[str, Any]:
        """Train to the end; go back to the last checkpoint as often as the runtime rebuilds a trainer that lost a rank.

        Args:
            timers: those of the start, for the trace.

        Raises:
            TrainerLostError: it may not be rebuilt any more.
        """
        lost: TrainerLostError | None = None
        while True:
            if lost is not None:
                self.state.policy_changed = True  # whatever the other ranks hold is of no use
                self.journal.enter(Phase.RECOVERING)
                timers = Timers()
                await self.memory.recover(lost, timers)
            try:
                if lost is None:
                    await self._restore(checkpoint, timers, during="start")
                else:
                    await self._go_back(lost, timers)
                await self._loop()
                return await self._finish()
            except TrainerLostError as error:
                lost = error

    async def _restore(self, checkpoint: Checkpoint | None, timers: Timers, during: str) -> None:
        """Bring every role to where the checkpoint was taken, and every generator to the trainer's weights.

        Args:
            timers: what they hold already, and what this adds, is written to the trace as of ``during``.
        """
        await self.environment.close()  # what it still has in the generators is not of the checkpoint
        self.state.pending = ()
        if checkpoint is not None:
            await self.saver.load(checkpoint, timers)
            self.state.pending = load_pending(checkpoint.path, self.assembly.train_set, self.environment.slots_of)
        if self._may_delete:
            self._say_what_is_removed()
            self.store.forget_after(self.state.step)
            self._may_delete = False
        for path in self.store.set_aside_after(self.state.step):
            text = f"a damaged checkpoint was passed over and is now {path}; delete it when you do not need it any more"
            self.journal.say(text, "set_aside", path=str(path))
        for text in self.directory.rewind(self.state.step if checkpoint else -1):
            self.journal.warn(text)
        self.journal.enter(Phase.SYNCING, self.state.step)
        await self._sync_weights(timers, self.state.step)
        self.directory.append_trace(self.state.step, timers, during)

    def _say_what_is_removed(self) -> None:
        """Checkpoints newer than the one that the run goes on from, and the metrics beside them: the steps are made
        again, and not the same way if settings changed.
        """
        step = self.state.step
        checkpoints = self.store.steps_after(step)
        if not checkpoints:
            return  # steps since the last checkpoint are made again by every run that resumes
        metrics = [line["step"] for line in self.directory.read_metrics() if line["step"] > step]
        text = f"removing checkpoints newer than step {step}, of step {', '.join(map(str, checkpoints))}"
        if metrics:
            text += f", and metrics and rollouts of steps {min(metrics)} to {max(metrics)}"
        self.journal.say(text, "removed", step=step, checkpoints=checkpoints, metrics=metrics)

    async def _go_back(self, lost: TrainerLostError, timers: Timers) -> None:
        """To the last checkpoint, with the trainer rebuilt. A rank that dies meanwhile is another loss."""
        checkpoint, problems = self.saver.last(self.state)
        if checkpoint is not None:
            self.state.take_over(checkpoint)
        else:
            self.state = RunState(build_sampler(self.assembly), policy_changed=True)
        self.state.alarms, self.state.line = Alarms(), {}  # they told of steps that are made again
        await self._restore(checkpoint, timers, during="recovery")
        self.state.policy_changed = False
        at = f"step {self.state.step}" if checkpoint is not None else "the beginning"
        self.journal.warn(
            "; ".join([f"{lost}. The trainer was rebuilt; training goes on from {at}", *problems]),
            "trainer_lost",
            step=self.state.step,
            error=str(lost),
        )

    async def _loop(self) -> None:
        if self.state.step == 0 and self.evaluator is not None and self.config.eval.at_start:
            timers = Timers()
            self.state.before = await self._evaluate(timers, 0)
            self.directory.append_trace(0, timers)
            self._write_step(0, self.state.before)
        for step in range(self.state.step + 1, self.config.train.steps + 1):
            await self._one_step(step)

    async def _one_step(self, step: int) -> None:
        timers = Timers()
        self.journal.step = step
        with timers.measure("step"):
            experience, warnings = await self._rollout(step, timers)
            self.journal.enter(Phase.UPDATING)
            self.state.policy_changed = True
            trained = await self.trainer.train(experience, timers)
            warnings += self.state.alarms.mismatch(values(trained))  # there, if no flow computed trainer logprobs
            self.journal.enter(Phase.SYNCING)
            synced = await self._sync_weights(timers, step)
        evaluated: dict[str, float] = {}
        if self._evaluation_is_due(step):
            evaluated = self.state.after = await self._evaluate(timers, step)
        merged = merge_metrics(experience.metrics, trained, synced, timers.metrics())
        line = values(merged) | throughput(merged) | epochs(self.state.sampler) | evaluated
        for text in warnings:
            self.journal.warn(f"step {step}: {text}")
        if self.config.log.rollouts:
            self.directory.write_rollouts(step, experience.samples[: self.config.log.rollouts])
        self.directory.append_trace(step, timers)
        self._write_step(step, line)  # before the checkpoint: what is written after it would be lost by a kill between
        self.state.complete(step, line, experience.pending)
        every = self.config.checkpoint.every
        if (every and step % every == 0) or step == self.config.train.steps:
            await self.saver.save(self.state)

    async def _rollout(self, step: int, timers: Timers) -> tuple[Experience, list[str]]:
        """A step's experience, and warnings about it; if it fails, its prompts have not been drawn."""
        before = self.state.sampler.state_dict()
        try:
            wanted = self.environment.num_prompts(self.config.train.prompts_per_step, self.state.pending)
            examples = self.state.sampler.next_batch(wanted)
            experience = await self.environment.make(step, examples, timers, self.state.pending)
            metrics = values(experience.metrics)
            self.observers.rollout_end(step, experience.samples, metrics)
            return experience, self.state.alarms.check(experience, metrics)
        except BaseException:
            self.state.sampler.load_state_dict(before)
            raise

    def _write_step(self, step: int, line: Mapping[str, float]) -> None:
        self.directory.append_metrics(step, line)
        self.loggers.log(step, line)
        self.observers.step_end(step, line)
        self.listener.step_done(step, line)

    def _evaluation_is_due(self, step: int) -> bool:
        if self.evaluator is None:
            return False
        every = self.config.eval.every
        last = step == self.config.train.steps
        return (last and self.config.eval.at_end) or bool(every and step % every == 0)

    async def _evaluate(self, timers: Timers, step: int) -> dict[str, float]:
        assert self.evaluator is not None
        self.journal.enter(Phase.EVALUATING, step)
        metrics, samples = await self.evaluator.evaluate(timers)
        line = values(metrics)
        self.listener.evaluated(step, line)
        if self.config.log.rollouts:
            self.directory.write_rollouts(step, samples[: self.config.log.rollouts], kind="eval")
        return line

    async def _sync_weights(self, timers: Timers, version: int) -> Metrics:
        """Every weight flow of the plan; after the last step of a run that evaluates nothing it is still done."""
        metrics: Metrics = {}
        for sync in self.assembly.plan.weight_syncs:
            async with self.memory.turn(*sync_uses(sync.trainer, sync.generator), timers=timers):
                with timers.measure("sync", role=sync.trainer) as facts:
                    facts["to"] = sync.generator
                    receipts = await self.runtime.sync_weights(sync.trainer, sync.generator, version)
            self.observers.weights_synced(version, receipts)
            metrics = merge_metrics(metrics, sync_metrics(receipts))
        await self.environment.weights_changed()
        return metrics

    async def _finish(self) -> dict[str, Any]:
        if left := num_samples(self.state.pending):
            text = f"{left} samples were not complete after the last step; they are in its checkpoint, and go on if "
            self.journal.say(f"{text}train.steps is raised", "unfinished", step=self.state.step, samples=left)
        model = None
        role = self.assembly.policy
        if self.config.checkpoint.export and role is not None:
            self.journal.enter(Phase.EXPORTING)
            timers = Timers()
            async with self.memory.turn(Use(role, "export"), timers=timers):
                with self.directory.replacing_model() as aside, timers.measure("export", role=role):
                    await self.runtime.trainer(role).export_model(aside)
            self.directory.append_trace(self.state.step, timers, during="export")
            model = str(self.directory.model)
        return self.ending.completed(self.state, model)

    async def _close(self) -> None:
        """Close everything; the outcome of the run stands, whatever fails here. Then say that it is over."""
        self.journal.enter(Phase.CLOSING)
        self.loggers.close()
        await self.environment.close()
        try:
            await self.runtime.close()
        except ChatLearnError as error:
            self.listener.warning(str(error))
        if self.ending.outcome is not None:
            self.observers.run_end(*self.ending.outcome)
            self.listener.finished(self.ending.outcome[1])
