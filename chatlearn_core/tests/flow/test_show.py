"""Graphs as text."""

from __future__ import annotations

from typing import Any

from chatlearn_core.flow import to_text, trace


def _flow(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts, temperature=0, stop=["<"])
    return m.join(samples, m.reward.score(samples), m.trainer.logprobs(samples))


GRAPH = trace(_flow, {"generator": "generator", "reward": "reward", "trainer": "trainer"}, name="a <flow>")


def test_text_names_every_call_its_input_and_when_it_starts() -> None:
    text = to_text(GRAPH)
    assert text.count("level") == 2
    assert 'generator.generate(temperature=0, stop=["<"])' in text
    assert "<- input" in text
    assert "adds trainer_logprobs (when all samples are there" in text
    assert "adds reward (sample by sample" in text


def test_an_empty_flow_has_its_name() -> None:
    graph = trace(lambda examples, m: examples, {}, name="sft", given="demonstrations")
    assert to_text(graph) == "flow sft"


def test_text_names_the_roles_that_a_role_calls() -> None:
    def flow(prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        return m.join(samples, m.reward.score(samples))

    kinds = {"generator": "generator", "reward": "reward", "judge": "generator"}
    text = to_text(trace(flow, kinds, uses={"reward": ["judge"]}))
    assert "adds reward (sample by sample; reward, uses judge; " in text
