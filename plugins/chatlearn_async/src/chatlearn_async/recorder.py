"""``chatlearn run --rollouts-only``: make the rollouts of a run's steps and write them, train nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from chatlearn_async.recorded import EXAMPLES, FACTS, FOLDER, GROUPS, SAMPLES, facts_of, production_nodes, store_in
from chatlearn_core.config.recorded import recorded_values
from chatlearn_core.exceptions import ConfigError, Interrupted
from chatlearn_core.executor.assembly import Assembly
from chatlearn_core.executor.component_factory import LoopParts, build_colocation, build_runtime
from chatlearn_core.executor.decisions import build_decisions, build_sampler
from chatlearn_core.executor.journal import Journal
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.progress import RunListener
from chatlearn_core.executor.resume import MAY_CHANGE, changed_settings, is_of, lock_run_directory
from chatlearn_core.executor.rollout_buffer import RolloutBuffer
from chatlearn_core.executor.rollout_producer import RolloutProducer
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.rollouts.saved import save_rollouts
from chatlearn_core.executor.step_samples import FinishedGroup, samples_of
from chatlearn_core.metrics import RunDirectory, Timers
from chatlearn_core.protocols.decisions import Stateful


class RolloutRecorder:
    """Makes ``train.steps`` steps' rollouts with the weights of ``model.path``, and writes each step's when it is
    complete. Only the roles that make rollouts start. A stopped recording goes on after its last complete step.

    Args:
        assembly: of the run.
        listener: receives the progress.

    Raises:
        ConfigError: the flow generates nothing.
    """

    def __init__(self, assembly: Assembly, listener: RunListener | None = None) -> None:
        self.assembly = assembly
        self.config = assembly.config
        self.listener = listener or RunListener()
        self.nodes = production_nodes(assembly)
        if not any(node.kind in ("generator", "environment") for node in self.nodes):
            raise ConfigError(
                f"{assembly.loaded.source}: --rollouts-only has nothing to write: the flow of algorithm "
                f"{self.config.algorithm.name!r} generates nothing. Omit the option"
            )
        if self.config.rollout.partial != "none":
            raise ConfigError(
                f"{assembly.loaded.source}: rollout.partial is {self.config.rollout.partial!r}, but --rollouts-only "
                "has no weight syncs over which a rollout could last. Set rollout.partial: none"
            )
        self.sampler = build_sampler(assembly.loaded, assembly.registry, assembly.train_set.datasets)
        self.decisions = build_decisions(assembly.loaded, assembly.registry)
        self.parts: Mapping[str, Stateful] = {
            "sampler": self.sampler,
            "decisions": self.decisions,
            "algorithm": assembly.algorithm,
        }
        self._settings: dict[str, Any] = recorded_values(assembly.loaded)

    async def record(self) -> Path:
        """Write what is missing; returns the directory for ``--from-rollouts``.

        Raises:
            Interrupted: stopped on request; the recording can go on.
            ConfigError: the directory has a recording with other settings.
            ChatLearnError: a role failed, or the disk.
        """
        run_dir = self.assembly.plan.run_dir
        self.directory = RunDirectory(run_dir)
        journal = Journal(self.directory, self.listener)
        with lock_run_directory(run_dir):
            self.store = store_in(run_dir)
            self.store.remove_unfinished()
            done = self._go_on(journal)
            steps = self.config.train.steps
            if done < steps:
                await self._start_and_record(done, journal)
            journal.say(f"the rollouts of {steps} steps are in {run_dir / FOLDER}", "recorded", steps=steps)
        return run_dir

    def _go_on(self, journal: Journal) -> int:
        """Restore the state after the last complete step, and return its number."""
        newest, problems = self.store.newest()
        for problem in problems:
            journal.warn(problem, "damaged_recording", problem=problem)
        if newest is None:
            return 0
        changed = [line for line in changed_settings(newest.state["config"], self._settings) if not _may_change(line)]
        if changed:
            raise ConfigError(
                f"{self.store.directory} has rollouts that were recorded with other settings:"
                + "".join(f"\n  {line}" for line in changed[:8])
                + "\n  Restore them, delete that directory, or choose another output_dir"
            )
        for name, part in self.parts.items():
            part.load_state_dict(newest.state[name])
        self.store.set_aside_after(newest.step)
        journal.say(f"rollouts of {newest.step} steps are recorded already", "resume", step=newest.step)
        return newest.step

    async def _start_and_record(self, done: int, journal: Journal) -> None:
        assembly = self.assembly
        called = {role for node in self.nodes for role in (node.role, *node.uses)}
        roles = {name: role for name, role in assembly.plan.roles.items() if name in called}
        alone = replace(assembly, plan=replace(assembly.plan, roles=roles, weight_syncs=()))
        runtime = build_runtime(alone)
        runtime.on_event = journal.runtime_event
        colocation = build_colocation(alone, runtime)
        rollouts = Rollouts(runtime, self.config.rollout, roles)
        parts = LoopParts(alone, runtime, rollouts, colocation, journal.during)
        scheduler = parts.scheduler(assembly.graph, assembly.sampling, self.nodes, journal.during)
        producer = RolloutProducer(
            scheduler,
            assembly.algorithm,
            self.sampler,
            assembly.sampling,
            self.config.seed,
            decisions=self.decisions,
            rollouts=rollouts,
            kind=assembly.kind,
        )
        facts = facts_of(assembly).as_json()
        try:
            with journal.during(Phase.STARTING, done):
                await colocation.start(Timers())
            self.listener.started(self.directory.path, self.config.train.steps, done + 1)
            for step in range(done + 1, self.config.train.steps + 1):
                journal.step, began = step, time.monotonic()
                groups = await self._produce(producer, step)
                buffer = RolloutBuffer(0)
                buffer.admit(groups)
                plain = await buffer.with_values(runtime.data)
                self.sampler.observe(samples_of([group.copy() for group in plain.groups]))
                self._write(step, plain, facts, began)
                done = step
        except asyncio.CancelledError:
            raise Interrupted(
                f"stopped after the rollouts of {done} steps, which are in {self.store.directory}. Run the same "
                "command again to continue"
            ) from None
        finally:
            journal.forget()
            parts.close()
            with journal.during(Phase.CLOSING):
                await producer.close()
                await runtime.close()

    async def _produce(self, producer: RolloutProducer, step: int) -> list[FinishedGroup]:
        """A step's groups, with those that its algorithm replaces others by."""
        groups = (await producer.produce(step, self.config.train.prompts_per_step)).groups
        for _ in range(self.config.rollout.max_refills):
            wanted = self.assembly.algorithm.wanted(samples_of([group.copy() for group in groups]))
            if wanted <= 0:
                break
            groups = [*groups, *(await producer.produce(step, wanted)).groups]
        return groups

    def _write(self, step: int, plain: RolloutBuffer, facts: Mapping[str, Any], began: float) -> None:
        """Write a step, and tell its numbers; ``began``: its start, seconds."""
        groups = plain.groups
        state: dict[str, Any] = {
            "config": self._settings,
            FACTS: facts,
            GROUPS: len(groups),
            SAMPLES: sum(len(group.requests) for group in groups),
            EXAMPLES: sorted({group.draw.example.id for group in groups}),
            **{name: part.state_dict() for name, part in self.parts.items()},
        }
        with self.store.write(step, state) as folder:
            save_rollouts(folder, (), plain.state_dict())
        scored = [sample.reward for sample in samples_of(groups) if sample.reward is not None]
        rewards = [reward.value for reward in scored if reward.value is not None]
        tokens = sum(group.num_sampled_tokens for group in groups)
        line = {
            "response_length/mean": tokens / state[SAMPLES],
            "perf/throughput": tokens / (time.monotonic() - began),
        }
        if rewards:
            line["reward"] = sum(rewards) / len(rewards)
        self.listener.step_done(step, line)


def _may_change(line: str) -> bool:
    """Whether a recording may go on although this setting differs."""
    return is_of(line, MAY_CHANGE)


async def record(assembly: Assembly, listener: RunListener | None = None) -> Path:
    """Record the rollouts of a run's steps: see ``RolloutRecorder``."""
    return await RolloutRecorder(assembly, listener).record()
