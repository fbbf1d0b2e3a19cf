"""The working parts of a run, built from its assembly."""

from __future__ import annotations

from collections.abc import Callable

from chatlearn_core.data import Sampler
from chatlearn_core.executor.assembly import Assembly
from chatlearn_core.executor.environment import Environment
from chatlearn_core.executor.evaluator import Evaluator
from chatlearn_core.executor.logprob_bases import DeclaredBases, declared_bases
from chatlearn_core.executor.memory import MemoryTurns
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.rollouts.partial import partial_rollouts
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.executor.training import ExperienceTrainer
from chatlearn_core.plugins.records import RuntimeSpec
from chatlearn_core.protocols import Runtime


def build_runtime(assembly: Assembly) -> Runtime:
    """The runtime that the configuration names."""
    choice = assembly.loaded.chosen("runtime")
    assert choice is not None
    assert isinstance(choice.record, RuntimeSpec)
    runtime: Runtime = assembly.registry.load_factory(choice.record)(choice.options, assembly.plan)
    return runtime


def build_memory(assembly: Assembly, runtime: Runtime) -> MemoryTurns:
    """Gives roles that share devices their turns.

    Raises:
        ConfigError: completions are to be kept in a KV cache that is released in between.
    """
    memory = MemoryTurns(runtime, assembly.plan.roles, assembly.config.memory.offload)
    if assembly.config.rollout.partial == "keep":
        memory.sharing.check_kept("rollout.partial: keep", [sync.generator for sync in assembly.plan.weight_syncs])
    return memory


def build_sampler(assembly: Assembly) -> Sampler:
    """Draws the training examples, from the beginning."""
    config = assembly.config
    return Sampler(assembly.train_set.datasets, seed=config.seed, shuffle=config.data.shuffle)


def build_environment(
    assembly: Assembly, runtime: Runtime, rollouts: Rollouts, enter: Callable[[Phase], None], memory: MemoryTurns
) -> Environment:
    """Makes experience; calls ``enter`` with the phase that begins."""
    scheduler = FlowScheduler(
        assembly.graph,
        runtime,
        temperature=assembly.sampling.temperature,
        group_rewards=assembly.group_rewards,
        enter=enter,
        memory=memory,
        front=rollouts,
        bases=_bases(assembly),
        roles=assembly.plan.roles,
    )
    partial = None
    if assembly.config.rollout.partial != "none":
        [call] = assembly.graph.calls("generate")
        partial = partial_rollouts(assembly.config, rollouts, call.role)
    return Environment(
        scheduler,
        assembly.algorithm,
        assembly.sampling,
        assembly.config.seed,
        rollouts=rollouts,
        partial=partial,
        policy=assembly.policy,
    )


def build_trainer(assembly: Assembly, runtime: Runtime, memory: MemoryTurns) -> ExperienceTrainer:
    """Consumes experience."""
    train = assembly.config.train
    return ExperienceTrainer(
        runtime,
        assembly.algorithm,
        num_mini_batches=train.mini_batches,
        epochs=train.epochs,
        seed=assembly.config.seed,
        memory=memory,
        roles=assembly.plan.roles,
        policy=assembly.policy,
    )


def build_evaluator(
    assembly: Assembly, runtime: Runtime, rollouts: Rollouts, memory: MemoryTurns | None = None
) -> Evaluator | None:
    """Evaluates; None if the configuration has nothing to evaluate on."""
    if assembly.evaluation is None or assembly.eval_set is None:
        return None
    sampling = assembly.eval_sampling
    return Evaluator(
        FlowScheduler(
            assembly.evaluation,
            runtime,
            temperature=sampling.temperature,
            group_rewards=assembly.group_rewards,
            memory=memory,
            front=rollouts,
            bases=_bases(assembly),
            roles=assembly.plan.roles,
        ),
        list(assembly.eval_set),
        sampling,
        samples_per_prompt=assembly.config.eval.samples_per_prompt,
        seed=assembly.config.seed,
    )


def _bases(assembly: Assembly) -> dict[str, DeclaredBases]:
    """What each generator says of its logprobs, by role."""
    return {name: declared_bases(role) for name, role in assembly.plan.roles.items() if role.kind == "generator"}
