"""Builds the components of a run from its assembly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from chatlearn_core.executor.advantages import AdvantageComputer
from chatlearn_core.executor.assembly import Assembly
from chatlearn_core.executor.cached_calls import CachedCalls
from chatlearn_core.executor.colocation import ColocationManager
from chatlearn_core.executor.decisions import Decisions
from chatlearn_core.executor.evaluator import Evaluator, Evaluators, OwnMetrics
from chatlearn_core.executor.generator_mismatch import GeneratorMismatch, policy_logprobs
from chatlearn_core.executor.logprob_bases import declared_bases
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.policy_updater import PolicyUpdater
from chatlearn_core.executor.rollout_buffer import RolloutBuffer, allowed_staleness
from chatlearn_core.executor.rollout_producer import RolloutProducer
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.rollouts.partial import partial_rollouts
from chatlearn_core.executor.run_state import RunState
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.executor.stages import step_stages
from chatlearn_core.flow import Graph, Node
from chatlearn_core.plugins.records import RolloutModeSpec, RuntimeSpec
from chatlearn_core.protocols import ExampleSampler, Runtime
from chatlearn_core.types import SamplingParams


def build_runtime(assembly: Assembly) -> Runtime:
    """The runtime named in the configuration."""
    choice = assembly.loaded.chosen("runtime")
    assert choice is not None
    assert isinstance(choice.record, RuntimeSpec)
    runtime: Runtime = assembly.registry.load_factory(choice.record)(choice.options, assembly.plan)
    return runtime


def build_colocation(assembly: Assembly, runtime: Runtime) -> ColocationManager:
    """The manager that leases devices to roles that share them.

    Raises:
        ConfigError: a setting keeps completions in a KV cache that is released between steps.
    """
    colocation = ColocationManager(runtime, assembly.plan.roles, assembly.config.memory.offload)
    if assembly.config.rollout.partial == "keep":
        colocation.sharing.check_kept("rollout.partial: keep", [sync.target for sync in assembly.plan.weight_syncs])
    return colocation


@dataclass(slots=True, frozen=True)
class LoopParts:
    """The parts from which producer, updater and evaluator are built."""

    assembly: Assembly
    runtime: Runtime
    rollouts: Rollouts
    """Rollout managers, which handle the requests to generators."""
    colocation: ColocationManager | None = None
    """None: no roles share devices."""
    during: Callable[[Phase], AbstractContextManager[None]] | None = None
    """Context entered while the calls of training flows run."""
    cached: CachedCalls | None = None
    """The cached results that the graph reads; None: it reads none."""
    schedulers: list[FlowScheduler] = field(default_factory=list, init=False)
    """Those made so far."""

    def close(self) -> None:
        """End the threads of users' functions."""
        for scheduler in self.schedulers:
            scheduler.close()

    def scheduler(
        self,
        graph: Graph,
        sampling: SamplingParams,
        stage: Sequence[Node] | None = None,
        during: Callable[[Phase], AbstractContextManager[None]] | None = None,
    ) -> FlowScheduler:
        """A scheduler for a graph, or for one stage of it."""
        plan = self.assembly.plan
        made = FlowScheduler(
            graph,
            self.runtime,
            stage=stage,
            sampling=sampling,
            seed=self.assembly.config.seed,
            group_rewards=self.assembly.group_rewards,
            during=during,
            colocation=self.colocation,
            front=self.rollouts,
            bases={name: declared_bases(role) for name, role in plan.roles.items() if role.kind == "generator"},
            plan=plan,
            max_length=self.assembly.max_length,
            cached=self.cached,
        )
        self.schedulers.append(made)
        return made


def _changing(assembly: Assembly) -> tuple[str, ...]:
    """Roles whose weights change: trained roles and the roles refreshed from them."""
    return (*assembly.learning.learners, *assembly.plan.refreshes)


@dataclass(slots=True, frozen=True)
class RolloutModeContext:
    """What a rollout mode makes its producer from."""

    parts: LoopParts
    sampler: ExampleSampler
    decisions: Decisions
    state: RunState
    """The state of the run, with its policy version."""
    max_staleness: int
    """Of tokens that are trained on."""


def build_rollout_producer(
    parts: LoopParts, sampler: ExampleSampler, decisions: Decisions, state: RunState
) -> RolloutProducer:
    """The producer of rollouts of the configured mode."""
    loaded = parts.assembly.loaded
    if (mode := loaded.chosen("rollout")) is None:
        return build_sync_producer(parts, sampler, decisions)
    context = RolloutModeContext(parts, sampler, decisions, state, _max_staleness(parts.assembly))
    producer: RolloutProducer = parts.assembly.registry.load_factory(mode.record)(mode.options, context)
    return producer


def _max_staleness(assembly: Assembly) -> int:
    rollout, mode = assembly.config.rollout, assembly.loaded.chosen("rollout")
    if rollout.max_staleness is None and mode is not None and isinstance(mode.record, RolloutModeSpec):
        return mode.record.max_staleness
    return allowed_staleness(rollout)


def production_scheduler(parts: LoopParts) -> FlowScheduler:
    """Runs the production stage of the flow."""
    production, _ = step_stages(parts.assembly.graph, _changing(parts.assembly))
    return parts.scheduler(parts.assembly.graph, parts.assembly.sampling, production, parts.during)


def build_sync_producer(parts: LoopParts, sampler: ExampleSampler, decisions: Decisions) -> RolloutProducer:
    """The producer of a run in which rollouts and updates take turns."""
    assembly = parts.assembly
    partial = None
    if assembly.config.rollout.partial != "none":
        [call] = assembly.graph.calls("generator.generate")
        partial = partial_rollouts(assembly.config, parts.rollouts, call.role)
    return RolloutProducer(
        production_scheduler(parts),
        assembly.algorithm,
        sampler,
        assembly.sampling,
        assembly.config.seed,
        decisions=decisions,
        rollouts=parts.rollouts,
        partial=partial,
        kind=assembly.kind,
    )


def build_rollout_buffer(assembly: Assembly) -> RolloutBuffer:
    """The buffer that holds finished rollouts until a step takes them."""
    return RolloutBuffer(_max_staleness(assembly), serving_generators(assembly))


def build_policy_updater(parts: LoopParts, decisions: Decisions) -> PolicyUpdater:
    """The consumer of rollouts, which runs the consumption stage of the flow, advantages and updates."""
    assembly, runtime, train = parts.assembly, parts.runtime, parts.assembly.config.train
    _, consumption = step_stages(assembly.graph, _changing(assembly))
    call, mismatch = policy_logprobs(assembly.graph, assembly.policy), None
    if call is not None:
        role = call.role
        mismatch = GeneratorMismatch(call, assembly.sampling, lambda: runtime.trainer(role))
    return PolicyUpdater(
        runtime,
        assembly.algorithm,
        consumption=parts.scheduler(assembly.graph, assembly.sampling, consumption, parts.during),
        advantages=AdvantageComputer(
            assembly.algorithm, lambda: runtime.trainer(assembly.home), decisions, runtime.data
        ),
        mismatch=mismatch,
        serving=serving_generators(assembly),
        num_mini_batches=train.mini_batches,
        epochs=train.epochs,
        seed=assembly.config.seed,
        colocation=parts.colocation,
        roles=assembly.plan.roles,
        policy=assembly.policy,
    )


def build_evaluators(parts: LoopParts) -> Evaluators | None:
    """The evaluators of all evaluation sets; None if the configuration has no evaluation data."""
    assembly = parts.assembly
    if not assembly.evaluations:
        return None
    return Evaluators(
        [
            Evaluator(
                parts.scheduler(one.graph, one.sampling),
                list(one.examples),
                one.sampling,
                own_metrics=_own_evaluation(assembly, parts.runtime),
                kind=assembly.eval_kind,
                samples_per_prompt=one.samples_per_prompt,
                seed=assembly.config.seed,
                name=one.name,
                measures=one.measures,
                dataset_of={
                    example.id: dataset.name for dataset in one.examples.datasets for example in dataset.examples
                },
            )
            for one in assembly.evaluations
        ]
    )


def _own_evaluation(assembly: Assembly, runtime: Runtime) -> OwnMetrics | None:
    """The algorithm's own metrics of held-out samples; None if evaluations sample and score prompts."""
    if assembly.algorithm.evaluation_input is None:
        return None
    return OwnMetrics(assembly.algorithm, lambda: runtime.trainer(assembly.home))


def serving_generators(assembly: Assembly) -> frozenset[str]:
    """The generators that serve the weights of trained roles."""
    return frozenset(route.target for route in assembly.plan.weight_syncs)
