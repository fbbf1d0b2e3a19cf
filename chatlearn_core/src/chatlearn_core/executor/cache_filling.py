"""Compute the outputs of frozen models that a run will read, before its own roles start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from chatlearn_core.executor.assembly import Assembly
from chatlearn_core.executor.cached_calls import CachedCalls, asked_about, cached_nodes
from chatlearn_core.executor.component_factory import build_runtime
from chatlearn_core.executor.decisions import build_sampler, next_draws
from chatlearn_core.flow import Node
from chatlearn_core.metrics import Timers
from chatlearn_core.types import ExampleDraw, Sample, SamplingParams, evaluation_draw


async def fill_cache(
    cached: CachedCalls, assembly: Assembly, sampler_state: dict[str, Any], steps: int, timers: Timers
) -> str:
    """Compute what is missing for the steps that are left and for evaluations. The roles that do are built for that
    alone and closed; where nothing is missing, none is.

    Args:
        sampler_state: where the run's sampler stands.
        steps: that are left.

    Returns:
        a sentence on what was done.

    Raises:
        ChatLearnError: a role failed, or the disk.
    """
    names, count, runtime = ", ".join(sorted(cached.roles)), 0, None
    alone = replace(assembly, plan=replace(assembly.plan, roles=cached.roles, weight_syncs=()))
    try:
        with timers.measure("fill_cache"):
            for wanted in _wanted(assembly, sampler_state, steps):
                missing = cached.missing(wanted)
                if missing and runtime is None:
                    runtime = build_runtime(alone)
                    await runtime.start()
                if runtime is not None:
                    await cached.fill(runtime, missing)
                count += sum(len(one.samples) for one in missing)
    finally:
        if runtime is not None:
            await runtime.close()
    if not count:
        return f"role {names}: everything that this run reads is in {cached.cache.path}; not started"
    return f"role {names}: computed {count} sequences, which are kept in {cached.cache.path}; closed"


Wanted = tuple[Node, SamplingParams, Sequence[Sample]]
"""A kept call, and samples whose outputs it requests."""


def _wanted(assembly: Assembly, sampler_state: dict[str, Any], steps: int) -> Iterator[list[Wanted]]:
    """What is kept: of calls on a step's own samples at once, because a sample has the same outputs in every step; of
    calls that request outputs of other samples step by step.
    """
    for node in cached_nodes(assembly.graph, assembly.cached_roles):
        by_step = node.method.other_samples is not None
        for drawn in _expected_draws(assembly, sampler_state, steps, by_step=by_step):
            samples = [sample for draw in drawn for sample in assembly.kind.samples(draw)]
            yield [(node, assembly.sampling, asked_about(node, samples, assembly.max_length))]
    for one in assembly.evaluations:
        for node in cached_nodes(one.graph, assembly.cached_roles):
            draws = [evaluation_draw(example, one.name) for example in one.examples]
            samples = [sample for draw in draws for sample in assembly.eval_kind.samples(draw)]
            yield [(node, one.sampling, asked_about(node, samples, assembly.max_length))]


def _expected_draws(
    assembly: Assembly, sampler_state: dict[str, Any], steps: int, *, by_step: bool
) -> Iterator[list[ExampleDraw]]:
    """Yield the examples that the run's sampler will draw, from a copy of it: those of each step, or all at once, which
    are all examples if it draws as many or more.
    """
    prompts = assembly.config.train.prompts_per_step
    if not by_step and steps * prompts >= len(assembly.train_set):
        yield [ExampleDraw(example, 0, example.id) for example in assembly.train_set]
        return
    sampler = build_sampler(assembly.loaded, assembly.registry, assembly.train_set.datasets)
    sampler.load_state_dict(sampler_state)
    batches = (next_draws(sampler, prompts) for _ in range(steps))
    yield from batches if by_step else [[draw for batch in batches for draw in batch]]
