"""Graphs as text, Mermaid and SVG."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from chatlearn_core.flow import to_mermaid, to_svg, to_text, trace


def _flow(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    return m.join(samples, m.reward.score(samples), m.trainer.logprobs(samples))


GRAPH = trace(_flow, {"generator": "generator", "reward": "reward", "trainer": "trainer"}, name="a <flow>")


def test_text_names_every_call_its_input_and_when_it_starts() -> None:
    text = to_text(GRAPH)
    assert text.count("level") == 2
    assert "generator.generate" in text
    assert "<- input" in text
    assert "adds trainer_logprobs (when all samples are there" in text
    assert "adds reward (sample by sample" in text


def test_mermaid_has_an_edge_for_every_input() -> None:
    lines = to_mermaid(GRAPH).splitlines()
    assert lines[0] == "flowchart LR"
    assert [line.strip() for line in lines if "-->" in line] == ["input --> n0", "n0 --> n1", "n0 --> n2"]


def test_svg_is_well_formed_escapes_names_and_has_a_box_for_every_call() -> None:
    root = ElementTree.fromstring(to_svg(GRAPH))
    space = "{http://www.w3.org/2000/svg}"
    assert root.findtext(f"{space}title") == "flow a <flow>"
    assert len(root.findall(f"{space}rect")) == len(GRAPH.nodes) + 1
    labels = [text.text for text in root.findall(f"{space}text")]
    assert {"input", "generator.generate", "reward.score", "trainer.logprobs", "+ trainer_logprobs"} <= set(labels)
    boxes = [(float(r.get("x", 0)), float(r.get("y", 0))) for r in root.findall(f"{space}rect")]
    assert len(set(boxes)) == len(boxes), "boxes lie on top of each other"


def test_an_empty_flow_has_a_picture_too() -> None:
    graph = trace(lambda examples, m: examples, {}, name="sft", input_kind="demonstrations")
    assert to_text(graph) == "flow sft"
    ElementTree.fromstring(to_svg(graph))
