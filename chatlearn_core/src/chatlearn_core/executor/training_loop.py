"""The steps of a run: produce and buffer rollouts, select and train on a step's, sync the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chatlearn_core.config.models import RunConfig
from chatlearn_core.executor.checkpointing import CheckpointWriter
from chatlearn_core.executor.decisions import Decisions
from chatlearn_core.executor.evaluator import Evaluators
from chatlearn_core.executor.journal import Journal
from chatlearn_core.executor.loggers import Loggers
from chatlearn_core.executor.metrics_line import epochs, throughput, values
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.policy_updater import PolicyUpdater
from chatlearn_core.executor.refresh import RoleRefresher
from chatlearn_core.executor.rollout_buffer import RolloutBuffer
from chatlearn_core.executor.rollout_producer import RolloutProducer
from chatlearn_core.executor.run_state import RunState
from chatlearn_core.executor.sample_metrics import exclusion_metrics
from chatlearn_core.executor.step_samples import FinishedGroup, num_sampled_tokens, samples_of
from chatlearn_core.executor.weight_sync_manager import WeightSyncManager
from chatlearn_core.metrics import Timers
from chatlearn_core.metrics.run_directory import recorded_fields
from chatlearn_core.plugins.observers import Observers
from chatlearn_core.protocols import Algorithm
from chatlearn_core.protocols.data_store import fields_read_by
from chatlearn_core.types import Metric, Metrics, Sample, merge_metrics


@dataclass(slots=True)
class TrainingLoop:
    """Makes the steps of a run, one after another.

    ``sampler -> RolloutProducer -> RolloutBuffer -> PolicyUpdater -> WeightSyncManager -> generators``
    """

    config: RunConfig
    state: RunState
    algorithm: Algorithm
    decisions: Decisions
    producer: RolloutProducer
    buffer: RolloutBuffer
    updater: PolicyUpdater
    weight_sync: WeightSyncManager
    refresher: RoleRefresher
    evaluator: Evaluators | None
    checkpoint_writer: CheckpointWriter
    loggers: Loggers
    journal: Journal
    observers: Observers

    async def run(self) -> None:
        """Make all remaining steps."""
        if self.state.step == 0 and self.evaluator is not None and self.config.eval.at_start:
            timers = Timers()
            self.state.before = await self._evaluate(self.evaluator, timers, 0)
            self.journal.directory.append_trace(0, timers)
            self._write_line(0, self.state.before)
        for step in range(self.state.step + 1, self.config.train.steps + 1):
            if self.state.stopped is not None:
                self.journal.say(f"stopped after step {self.state.step}: {self.state.stopped}", "stopped")
                return
            await self._step(step)

    async def _step(self, step: int) -> None:
        timers, state = Timers(), self.state
        self.journal.step = step
        await self.checkpoint_writer.settle(only_if_done=True)
        with timers.measure("step"):
            groups, produced = await self._collect(step, timers)
            experience = await self.updater.prepare(step, groups, state.policy_version, timers)
            made = merge_metrics(produced, experience.metrics)
            sampler, data = self.producer.sampler, self.updater.runtime.data
            sampler.observe(await data.aget(experience.samples, fields_read_by(sampler)))
            self.observers.rollout_end(step, experience.samples, values(made), data)
            warnings = state.alarms.check(experience, values(made))
            state.policy_changed = True
            learned = {update.role for update in self.algorithm.updates(step)}
            with self.journal.during(Phase.UPDATING):
                async with self.weight_sync.updating(state, learned):
                    trained = await self.updater.train(experience, timers)
            warnings += state.alarms.mismatch(values(trained))  # contains it if no flow computed trainer logprobs
            with self.journal.during(Phase.SYNCING):
                await self.producer.before_sync()
                synced = await self.weight_sync.publish(state, learned, timers)
                refreshed = await self.refresher.refresh(step, timers)
            await self.producer.updates_done()
        evaluated: dict[str, float] = {}
        if self.evaluator is not None and self._evaluation_is_due(step):
            evaluated = state.after = await self._evaluate(self.evaluator, timers, step)
        merged = merge_metrics(made, trained, synced, refreshed, timers.metrics())
        line = values(merged) | throughput(merged) | epochs(self.producer.sampler) | evaluated
        decision = self.decisions.after_step(step, line, self.producer.sampling)
        state.stopped = decision.stop
        line |= decision.metrics
        if decision.stop is not None and not evaluated and self.evaluator is not None and self.config.eval.at_end:
            state.after = await self._evaluate(self.evaluator, timers, step)
            line |= state.after
        for text in warnings:
            self.journal.warn(f"step {step}: {text}")
        await self._write_rollouts(step, experience.samples)
        self.journal.directory.append_trace(step, timers)
        self._write_line(step, line)  # before the checkpoint: a kill in between would lose lines written after it
        self.algorithm.after_step(step, dict(line))
        state.complete(step, line, self.producer.pending, self.buffer)
        every, is_last = self.config.checkpoint.every, step == self.config.train.steps or state.stopped is not None
        if (every and step % every == 0) or is_last:
            await self.checkpoint_writer.save(state, background=self.config.checkpoint.background and not is_last)

    async def _collect(self, step: int, timers: Timers) -> tuple[list[FinishedGroup], Metrics]:
        """The groups of a step, and metrics of producing and excluding groups.

        Without partial rollouts a step takes ``train.prompts_per_step`` groups, buffered ones first; with them it takes
        all finished groups. While the algorithm wants more, the step takes further groups from the buffer, then has
        more produced; the rest stays in the buffer.
        """
        metrics: list[Metrics] = [self._evict()]
        missing = max(0, self.config.train.prompts_per_step - len(self.buffer))
        size = None if self.producer.partial is not None else self.config.train.prompts_per_step
        metrics.append(await self._produce(step, missing, timers))
        groups, refills = self.buffer.select(size), 0
        while (wanted := self.algorithm.wanted(samples_of(groups))) > 0:
            if further := self.buffer.select(1):
                groups += further
            elif refills < self.config.rollout.max_refills:
                refills += 1
                metrics.append(await self._produce(step, wanted, timers))
            else:
                text = f"after {refills} refills (rollout.max_refills) algorithm {self.config.algorithm.name!r} would "
                text += f"draw {wanted} more prompts; the step trains on those of its {len(groups)} groups that are "
                text += "not excluded"
                self.journal.warn(text, "refill")
                break
        if refills:
            metrics.append({"rollout/refills": Metric(refills, reducer="sum")})
        if left := samples_of(self.buffer.groups):
            tokens = Metric(num_sampled_tokens(left), reducer="sum")
            metrics.append({"rollout/buffered": Metric(len(left), reducer="sum"), "rollout/buffered_tokens": tokens})
        return groups, merge_metrics(*metrics)

    async def _produce(self, step: int, missing: int, timers: Timers) -> Metrics:
        """Produce groups, and add them to the buffer."""
        production = await self.producer.produce(step, missing)
        timers.include(production.timers)
        self.buffer.admit(production.groups)
        admitted = sum(len(group.requests) for group in production.groups)
        return production.metrics | {"samples/admitted": Metric(admitted, reducer="sum")}

    def _evict(self) -> Metrics:
        """Evict groups that are too old; their samples count as excluded, their tokens as discarded."""
        evicted = self.buffer.evict(self.state.policy_version)
        return exclusion_metrics(samples_of(evicted)) if evicted else {}

    def _write_line(self, step: int, line: Mapping[str, float]) -> None:
        self.journal.directory.append_metrics(step, line)
        self.loggers.log(step, line)
        self.observers.step_end(step, line)
        self.journal.listener.step_done(step, line)

    async def _write_rollouts(self, step: int, samples: Sequence[Sample], kind: str = "step") -> None:
        """Write as many samples as configured, with the values shown in a line of the file."""
        chosen = samples[: self.config.log.rollouts]
        if chosen:
            plain = await self.updater.runtime.data.aget(chosen, recorded_fields(chosen))
            self.journal.directory.write_rollouts(step, plain, kind=kind)

    def _evaluation_is_due(self, step: int) -> bool:
        every = self.config.eval.every
        last = step == self.config.train.steps
        return (last and self.config.eval.at_end) or bool(every and step % every == 0)

    async def _evaluate(self, evaluator: Evaluators, timers: Timers, step: int) -> dict[str, float]:
        with self.journal.during(Phase.EVALUATING, step):
            metrics, samples = await evaluator.evaluate(timers)
        line = values(metrics)
        self.journal.listener.evaluated(step, line)
        await self._write_rollouts(step, samples, kind="eval")
        return line
