"""A run from start to end: experience, training, weight sync, evaluation, checkpoints, and whatever goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from chatlearn_core.data import Sampler
from chatlearn_core.exceptions import (
    BackendTimeoutError,
    ChatLearnError,
    CheckpointError,
    Interrupted,
    TrainerLostError,
)
from chatlearn_core.executor.alarms import Alarms
from chatlearn_core.executor.assembly import Assembly
from chatlearn_core.executor.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from chatlearn_core.executor.environment import Environment
from chatlearn_core.executor.evaluator import Evaluator
from chatlearn_core.executor.progress import RunListener
from chatlearn_core.executor.resume import ResumeMode, find_resume_point, lock_run_directory
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.executor.summary import summary
from chatlearn_core.executor.training import ExperienceTrainer
from chatlearn_core.flow import to_svg
from chatlearn_core.metrics import RunDirectory, Timers
from chatlearn_core.plugins.hookspec import RunStatus
from chatlearn_core.plugins.observers import Observers
from chatlearn_core.plugins.records import RuntimeSpec
from chatlearn_core.protocols import Logger, Runtime
from chatlearn_core.types import Metric, Metrics, SamplingParams, merge_metrics

COUNTED = ("samples/total", "samples/trained", "samples/excluded", "perf/trained_tokens")
"""Metrics that are added up over the whole run, in checkpoints and in the summary."""


class Run:
    """One training run.

    Args:
        assembly: the checked parts.
        listener: is told how it goes.
        observers: plugins' observing hooks.
    """

    def __init__(
        self, assembly: Assembly, *, listener: RunListener | None = None, observers: Observers | None = None
    ) -> None:
        self.assembly = assembly
        self.config = assembly.config
        self.listener = listener or RunListener()
        self.observers = observers or Observers()
        self.step = 0
        """Last completed step."""
        self._policy_changed = False
        """Whether updates of a step that is not complete have been made: then the weights are nobody's."""
        self._saved_step = -1
        self._saved_path: Path | None = None
        """The checkpoint of that step; in another run's directory where ``--resume PATH`` named one there."""
        self._line: dict[str, float] = {}
        """Metrics of the last completed step."""
        self._ending: tuple[RunStatus, dict[str, Any]] | None = None
        self._before: dict[str, float] = {}
        self._after: dict[str, float] = {}
        self._totals = dict.fromkeys(COUNTED, 0.0)
        self._alarms = Alarms()
        self._settings: dict[str, Any] = self.config.model_dump(mode="json")

    async def train(self, resume: ResumeMode | Path = "auto") -> dict[str, Any]:
        """Train to the end, or from the newest checkpoint to the end; returns the content of ``summary.json``.

        Raises:
            Interrupted: stopped on request; resumable.
            ChatLearnError: what went wrong; resumable unless the message says otherwise.
        """
        self.directory = RunDirectory(self.assembly.plan.run_dir)
        self._started = time.monotonic()
        with lock_run_directory(self.directory.path):
            self.store = CheckpointStore(
                self.directory.checkpoints,
                keep_last=self.config.checkpoint.keep_last,
                keep_best=self.config.checkpoint.keep_best,
            )
            point = find_resume_point(
                self.store,
                resume,
                self._settings,
                self.config.train.steps,
                has_metrics=self.directory.metrics_file.exists(),
                is_complete=self._ended_well(),
            )
            for note in point.notes:
                self.listener.message(note)
                self.directory.append_event("resume", note=note)
            self._write_static_files()
            self._build()
            if point.checkpoint is not None:
                self._continue_from(point.checkpoint)
            self.observers.run_start(self._settings, self.directory.path)
            try:
                for logger in self._loggers:
                    logger.start(self._settings)
                await self.runtime.start()
                await self._restore(point.checkpoint)
                self.listener.started(self.directory.path, self.config.train.steps, self.step + 1)
                return await self._train_through_losses()
            except asyncio.CancelledError:
                raise await self._interrupted() from None
            except Exception as error:
                await self._failed(error)
                raise
            finally:
                await self._close()

    def _ended_well(self) -> bool:
        """Whether the directory holds this very run, finished: its last steps made and its model exported."""
        earlier = self.directory.read_summary()
        return earlier.get("status") == "completed" and earlier.get("planned_steps") == self.config.train.steps

    def _write_static_files(self) -> None:
        self.directory.write_text("config.yaml", yaml.safe_dump(self._settings, sort_keys=False))
        self.directory.write_text("flow.svg", to_svg(self.assembly.graph))
        evaluated = self.assembly.eval_set.reports if self.assembly.eval_set is not None else ()
        for dataset in [*self.assembly.train_set.reports, *evaluated]:
            if dataset.num_bad or dataset.num_filtered:
                self.listener.warning(str(dataset))
                self.directory.append_event("data", report=str(dataset))

    def _build(self) -> None:
        assembly, config = self.assembly, self.config
        self.runtime = build_runtime(assembly)
        self.sampler = Sampler(assembly.train_set.datasets, seed=config.seed, shuffle=config.data.shuffle)
        self.environment = Environment(
            self._scheduler(assembly.graph, assembly.sampling), assembly.algorithm, assembly.sampling, config.seed
        )
        self.trainer = ExperienceTrainer(
            self.runtime,
            assembly.algorithm,
            num_mini_batches=config.train.mini_batches,
            epochs=config.train.epochs,
            seed=config.seed,
        )
        self.evaluator = None
        if assembly.evaluation is not None and assembly.eval_set is not None:
            self.evaluator = Evaluator(
                self._scheduler(assembly.evaluation, assembly.eval_sampling),
                list(assembly.eval_set),
                assembly.eval_sampling,
                samples_per_prompt=config.eval.samples_per_prompt,
                seed=config.seed,
            )
        self._loggers = build_loggers(assembly, self.directory.path)

    def _scheduler(self, graph: Any, sampling: SamplingParams) -> FlowScheduler:
        return FlowScheduler(
            graph, self.runtime, temperature=sampling.temperature, group_rewards=self.assembly.group_rewards
        )

    def _continue_from(self, checkpoint: Checkpoint) -> None:
        """Take over what the executor keeps itself. From here on the run is where the checkpoint was taken: one that
        stops before its roles are up has lost nothing.
        """
        state = checkpoint.state
        self.sampler.load_state_dict(state["sampler"])
        self._before, self._after = dict(state["eval_before"]), dict(state["eval_after"])
        self._totals = dict(state["totals"])
        self.step = self._saved_step = checkpoint.step
        self._saved_path = checkpoint.path

    async def _restore(self, checkpoint: Checkpoint | None) -> None:
        """Bring every role to where the checkpoint was taken, and every generator to the trainer's weights."""
        if checkpoint is not None:
            for role in self.assembly.algorithm.losses():
                await self.runtime.trainer(role).load(checkpoint.path / "roles" / role)
        self._say_what_is_removed()
        self.directory.rewind(self.step if checkpoint else -1)
        self.store.forget_after(self.step)
        await self._sync_weights(Timers())

    def _say_what_is_removed(self) -> None:
        """Checkpoints newer than the one that the run goes on from, and the metrics beside them: the steps are made
        again, and not the same way if settings changed.
        """
        checkpoints = self.store.steps_after(self.step)
        if not checkpoints:
            return  # steps since the last checkpoint are made again by every run that resumes
        metrics = [line["step"] for line in self.directory.read_metrics() if line["step"] > self.step]
        text = f"removing checkpoints newer than step {self.step}, of step {', '.join(map(str, checkpoints))}"
        if metrics:
            text += f", and metrics and rollouts of steps {min(metrics)} to {max(metrics)}"
        self.listener.message(text)
        self.directory.append_event("removed", step=self.step, checkpoints=checkpoints, metrics=metrics)

    async def _train_through_losses(self) -> dict[str, Any]:
        """Train to the end; go back to the last checkpoint as often as the runtime rebuilds a trainer that lost a rank.

        Raises:
            TrainerLostError: it may not be rebuilt any more.
        """
        while True:
            try:
                await self._loop()
                return await self._finish()
            except TrainerLostError as lost:
                await self._recover(lost)

    async def _recover(self, lost: TrainerLostError) -> None:
        self._policy_changed = True  # whatever the other ranks hold is of no use
        await self.runtime.recover(lost)
        checkpoint, problems = self._last_checkpoint()
        if checkpoint is not None:
            self._continue_from(checkpoint)
        else:
            self._start_over()
        self._alarms, self._line = Alarms(), {}  # they told of steps that are made again
        await self._restore(checkpoint)
        self._policy_changed = False
        at = f"step {self.step}" if checkpoint is not None else "the beginning"
        self.listener.warning("; ".join([f"{lost}. The trainer was rebuilt; training goes on from {at}", *problems]))
        self.directory.append_event("trainer_lost", step=self.step, error=str(lost))

    def _last_checkpoint(self) -> tuple[Checkpoint | None, list[str]]:
        """What this run last saved or began from, which may be in another run's directory; if it is damaged, the newest
        of this run's own, and what is wrong with those passed over.
        """
        if self._saved_path is None:
            return None, []
        try:
            return read_checkpoint(self._saved_path), []
        except CheckpointError as error:
            checkpoint, problems = self.store.newest()
            return checkpoint, list(dict.fromkeys([str(error), *problems]))

    def _start_over(self) -> None:
        self.sampler = Sampler(
            self.assembly.train_set.datasets, seed=self.config.seed, shuffle=self.config.data.shuffle
        )
        self._before, self._after = {}, {}
        self._totals = dict.fromkeys(COUNTED, 0.0)
        self.step, self._saved_step, self._saved_path = 0, -1, None

    async def _loop(self) -> None:
        if self.step == 0 and self.evaluator is not None and self.config.eval.at_start:
            self._before = await self._evaluate(Timers())
            self._write_step(0, self._before)
        for step in range(self.step + 1, self.config.train.steps + 1):
            await self._one_step(step)

    async def _one_step(self, step: int) -> None:
        timers = Timers()
        sampler_state = self.sampler.state_dict()
        with timers.measure("step"):
            try:
                self.listener.phase(step, "generating")
                examples = self.sampler.next_batch(self.config.train.prompts_per_step)
                experience = await self.environment.make(step, examples, timers)
                metrics = values(experience.metrics)
                self.observers.rollout_end(step, experience.samples, metrics)
                warnings = self._alarms.check(experience, metrics)
            except BaseException:
                self.sampler.load_state_dict(sampler_state)
                raise
            self.listener.phase(step, "updating")
            self._policy_changed = True
            trained = await self.trainer.train(experience, timers)
            self.listener.phase(step, "syncing")
            synced = await self._sync_weights(timers, version=step)
        evaluated: dict[str, float] = {}
        if self._evaluation_is_due(step):
            evaluated = await self._evaluate(timers, step)
            self._after = evaluated
        merged = merge_metrics(experience.metrics, trained, synced, timers.metrics())
        line = values(merged) | throughput(merged) | self._epochs() | evaluated
        for text in warnings:
            self.listener.warning(f"step {step}: {text}")
            self.directory.append_event("warning", step=step, text=text)
        if self.config.log.rollouts:
            self.directory.write_rollouts(step, experience.samples[: self.config.log.rollouts])
        self._write_step(step, line)  # before the checkpoint: what is written after it would be lost by a kill between
        for name in COUNTED:
            self._totals[name] += line.get(name, 0.0)
        self.step, self._policy_changed, self._line = step, False, line
        every = self.config.checkpoint.every
        if (every and step % every == 0) or step == self.config.train.steps:
            await self._save()

    def _write_step(self, step: int, line: Mapping[str, float]) -> None:
        self.directory.append_metrics(step, line)
        for logger in self._loggers:
            self._log(logger, step, line)
        self.observers.step_end(step, line)
        self.listener.step_done(step, line)

    def _log(self, logger: Logger, step: int, line: Mapping[str, float]) -> None:
        """Pass a step on to a logger; one that fails is told about, and the run, whose own files are whole, goes on."""
        try:
            logger.log(step, line)
        except Exception as error:
            text = f"logger {type(logger).__name__} failed at step {step}: {type(error).__name__}: {error}"
            self.listener.warning(text)
            self.directory.append_event("warning", step=step, text=text)

    def _epochs(self) -> dict[str, float]:
        epochs = self.sampler.epochs
        if len(epochs) == 1:
            return {"training/epoch": next(iter(epochs.values()))}
        return {f"training/epoch/{name}": value for name, value in epochs.items()}

    def _evaluation_is_due(self, step: int) -> bool:
        if self.evaluator is None:
            return False
        every = self.config.eval.every
        last = step == self.config.train.steps
        return (last and self.config.eval.at_end) or bool(every and step % every == 0)

    async def _evaluate(self, timers: Timers, step: int = 0) -> dict[str, float]:
        assert self.evaluator is not None
        self.listener.phase(step, "evaluating")
        metrics, samples = await self.evaluator.evaluate(timers)
        line = values(metrics)
        self.listener.evaluated(step, line)
        if self.config.log.rollouts:
            self.directory.write_rollouts(step, samples[: self.config.log.rollouts], kind="eval")
        return line

    async def _sync_weights(self, timers: Timers, version: int | None = None) -> Metrics:
        """Every weight flow of the plan; after the last step of a run that evaluates nothing it is still done."""
        policy_version = self.step if version is None else version
        metrics: Metrics = {}
        for sync in self.assembly.plan.weight_syncs:
            with timers.measure("sync"):
                receipts = await self.runtime.sync_weights(sync.trainer, sync.generator, policy_version)
            self.observers.weights_synced(policy_version, receipts)
            num_bytes = max(receipt.num_bytes for receipt in receipts)
            weight_bytes = max(receipt.weight_bytes for receipt in receipts)
            flow: Metrics = {
                "sync/bytes": Metric(num_bytes, reducer="sum"),
                "sync/payload_share": Metric(num_bytes / weight_bytes if weight_bytes else 1.0),
                "sync/slowest_replica_s": Metric(max(receipt.seconds for receipt in receipts), reducer="max"),
            }
            metrics = merge_metrics(metrics, flow)
        return metrics

    async def _save(self) -> None:
        """Write a checkpoint of the last completed step. Once begun it is finished, also when the run is stopped."""
        writing = asyncio.ensure_future(self._write_checkpoint())
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await writing
            raise

    async def _write_checkpoint(self) -> None:
        self.listener.phase(self.step, "saving")
        state = {
            "config": self._settings,
            "sampler": self.sampler.state_dict(),
            "policy_version": self.step,
            "totals": self._totals,
            "eval_before": self._before,
            "eval_after": self._after,
            "metric": self._line.get(self.config.checkpoint.metric),
        }
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(self.store.write(self.step, state))
            for role in self.trainer.losses:
                await self.runtime.trainer(role).save(directory / "roles" / role)
            # Checksums and fsync of many gigabytes would hold up everything else that the event loop has to do.
            await asyncio.to_thread(stack.pop_all().close)
        self._saved_step, self._saved_path = self.step, self.store.path_of(self.step)
        self.observers.checkpoint_saved(self.step, self._saved_path)

    async def _finish(self) -> dict[str, Any]:
        model = None
        if self.config.checkpoint.export:
            role = next(iter(self.trainer.losses))
            self.listener.phase(self.step, "exporting")
            with self.directory.replacing_model() as aside:
                await self.runtime.trainer(role).export_model(aside)
            model = str(self.directory.model)
        return self._end("completed", model=model)

    async def _interrupted(self) -> Interrupted:
        """Keep what is complete, and say how to go on."""
        kept = await self._rescue()
        self._record_end("interrupted", "stopped on request")
        return Interrupted(f"stopped after step {self.step}. {kept} Run the same command again to go on")

    async def _failed(self, error: Exception) -> None:
        self.observers.error(error)
        kept = await self._rescue(hangs=_is_timeout(error))
        self.listener.message(f"the run failed after step {self.step}. {kept}")
        self._record_end("failed", f"{type(error).__name__}: {error}", kept=kept)

    def _record_end(self, status: RunStatus, error: str, **facts: str) -> None:
        """Write down how the run ended; what stopped it may be the very disk that this is written to."""
        try:
            name = "error" if status == "failed" else status
            self.directory.append_event(name, step=self.step, error=error, **facts)
            self._end(status, error=error)
        except ChatLearnError as unwritten:
            self.listener.warning(f"how the run ended could not be recorded: {unwritten}")

    async def _close(self) -> None:
        """Close everything; the outcome of the run stands, whatever fails here. Then say that it is over."""
        for logger in self._loggers:
            try:
                logger.close()
            except Exception as error:
                self.listener.warning(f"closing the logger {type(logger).__name__} failed: {error}")
        try:
            await self.runtime.close()
        except ChatLearnError as error:
            self.listener.warning(str(error))
        if self._ending is not None:
            self.observers.run_end(*self._ending)
            self.listener.finished(self._ending[1])

    async def _rescue(self, *, hangs: bool = False) -> str:
        """Save the last completed step if it is still in memory; says what can be resumed.

        Args:
            hangs: a role did not answer in time: saving would wait behind the call that hangs, for as long again.
        """
        lost = ""
        if self.step > self._saved_step and self.step > 0 and not self._policy_changed:
            if hangs:
                lost = f"Step {self.step} could not be saved, since a call still hangs. "
            else:
                try:
                    await self._save()
                except ChatLearnError as error:
                    lost = f"Step {self.step} could not be saved ({error}). "
        if self._saved_path is not None:
            return f"{lost}A checkpoint of step {self._saved_step} is in {self._saved_path.parent}."
        if lost:
            return f"{lost}There is no checkpoint, so the run starts from the beginning."
        return "No step was complete yet, so it starts from the beginning."

    def _end(self, status: RunStatus, *, model: str | None = None, error: str | None = None) -> dict[str, Any]:
        best = max(
            (c for c in self.store.complete() if c.metric is not None), key=lambda c: (c.metric, c.step), default=None
        )
        content = summary(
            name=self.config.name,
            status=status,
            steps=self.step,
            planned_steps=self.config.train.steps,
            before=self._before,
            after=self._after,
            totals=self._totals,
            best={"step": best.step, self.config.checkpoint.metric: best.metric} if best else None,
            model=model,
            checkpoint=str(self._saved_path) if self._saved_path is not None else None,
            wall_s=time.monotonic() - self._started,
            error=error,
            registry=self.assembly.registry,
        )
        self._ending = (status, content)
        self.directory.write_json("summary.json", content)
        return content


def _is_timeout(error: BaseException) -> bool:
    """Whether a role's lane is blocked: a call did not return in time, be it that of a checkpoint."""
    return isinstance(error, BackendTimeoutError) or (
        isinstance(error, CheckpointError) and isinstance(error.__cause__, BackendTimeoutError)
    )


def build_runtime(assembly: Assembly) -> Runtime:
    """The runtime that the configuration names."""
    choice = assembly.loaded.chosen("runtime")
    assert choice is not None
    assert isinstance(choice.record, RuntimeSpec)
    runtime: Runtime = assembly.registry.load_factory(choice.record)(choice.options, assembly.plan)
    return runtime


def build_loggers(assembly: Assembly, run_dir: Path) -> list[Logger]:
    """The loggers that the configuration names."""
    loggers: list[Logger] = []
    for index in range(len(assembly.config.log.loggers)):
        choice = assembly.loaded.chosen("log", "loggers", index)
        assert choice is not None
        loggers.append(assembly.registry.load_factory(choice.record)(choice.options, run_dir))
    return loggers


def values(metrics: Metrics) -> dict[str, float]:
    """Reduced numbers, sorted by name."""
    return {name: metrics[name].value for name in sorted(metrics)}


def throughput(metrics: Metrics) -> dict[str, float]:
    """``perf/throughput``: tokens trained on a second of the step."""
    seconds = metrics["timing_s/step"].value
    tokens = metrics["perf/trained_tokens"].value
    return {"perf/throughput": tokens / seconds if seconds else 0.0}
