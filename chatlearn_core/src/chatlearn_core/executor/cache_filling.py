"""Compute the outputs of frozen models that a run will read, before its own roles start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from chatlearn_core.executor.assembly import Assembly
from chatlearn_core.executor.cached_calls import CachedCalls, cached_nodes
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
    missing = cached.missing(_wanted(assembly, sampler_state, steps))
    names = ", ".join(sorted(cached.roles))
    if not missing:
        return f"role {names}: everything that this run reads is in {cached.cache.path}; not started"
    roles = {one.node.role: cached.roles[one.node.role] for one in missing}
    alone = replace(assembly, plan=replace(assembly.plan, roles=roles, weight_syncs=()))
    runtime = build_runtime(alone)
    try:
        with timers.measure("fill_cache"):
            await runtime.start()
            await cached.fill(runtime, missing)
    finally:
        await runtime.close()
    count = sum(len(one.samples) for one in missing)
    return f"role {names}: computed {count} sequences, which are kept in {cached.cache.path}; closed"


def _wanted(
    assembly: Assembly, sampler_state: dict[str, Any], steps: int
) -> Iterator[tuple[Node, SamplingParams, Sequence[Sample]]]:
    """Each kept call, with the samples that it will be made for."""
    nodes = cached_nodes(assembly.graph)
    if nodes:
        draws = _expected_draws(assembly, sampler_state, steps)
        samples = [sample for draw in draws for sample in assembly.kind.samples(draw)]
        yield from ((node, assembly.sampling, samples) for node in nodes if node.role in assembly.cached_roles)
    for one in assembly.evaluations:
        for node in cached_nodes(one.graph):
            if node.role in assembly.cached_roles:
                draws = [evaluation_draw(example, one.name) for example in one.examples]
                yield node, one.sampling, [sample for draw in draws for sample in assembly.eval_kind.samples(draw)]


def _expected_draws(assembly: Assembly, sampler_state: dict[str, Any], steps: int) -> list[ExampleDraw]:
    """Return the examples that the run's sampler will draw, from a copy of it; all examples if it draws as many or
    more.
    """
    count = steps * assembly.config.train.prompts_per_step
    if count >= len(assembly.train_set):
        return [ExampleDraw(example, 0, example.id) for example in assembly.train_set]
    sampler = build_sampler(assembly.loaded, assembly.registry, assembly.train_set.datasets)
    sampler.load_state_dict(sampler_state)
    return next_draws(sampler, count) if count else []
