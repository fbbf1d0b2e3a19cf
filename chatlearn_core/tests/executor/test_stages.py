"""Stages of a step: what trainers compute is consumption, unless a production call needs it."""

from __future__ import annotations

from typing import Any

from chatlearn_core.executor.stages import step_stages
from chatlearn_core.flow import trace

ROLES = {"learner": "trainer", "reference": "trainer", "other": "trainer", "sampler": "generator", "judge": "reward"}


def names(flow: Any) -> tuple[list[str], list[str]]:
    production, consumption = step_stages(trace(flow, ROLES), ["learner"])
    return [node.name for node in production], [node.name for node in consumption]


def test_a_reference_computes_with_the_learner() -> None:
    def flow(prompts: Any, m: Any) -> Any:
        samples = m.sampler.generate(prompts)
        return m.join(m.reference.logprobs(samples), m.judge.score(samples), m.learner.logprobs(samples))

    assert names(flow) == (["sampler.generate", "judge.score"], ["reference.logprobs", "learner.logprobs"])


def test_what_a_reward_needs_is_production() -> None:
    def flow(prompts: Any, m: Any) -> Any:
        samples = m.sampler.generate(prompts)
        known = m.reference.logprobs(samples)
        return m.join(m.judge.score(known), m.other.logprobs(known))

    assert names(flow) == (["sampler.generate", "reference.logprobs", "judge.score"], ["other.logprobs"])


def test_a_reward_that_calls_a_role_that_learns_is_consumption() -> None:
    def flow(prompts: Any, m: Any) -> Any:
        samples = m.sampler.generate(prompts)
        return m.join(m.judge.score(samples), m.learner.logprobs(samples))

    for used, stage in (("reference", 0), ("learner", 1)):
        graph = trace(flow, ROLES, uses={"judge": [used]})
        assert "judge.score" in [node.name for node in step_stages(graph, ["learner"])[stage]]
