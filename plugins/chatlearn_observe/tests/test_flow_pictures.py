"""Flows as Mermaid and SVG, and the picture in the run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from chatlearn_core.flow import trace
from chatlearn_observe import plugin
from chatlearn_observe.flow_pictures import to_mermaid, to_svg


def _flow(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts, temperature=0, stop=["<"])
    return m.join(samples, m.reward.score(samples), m.trainer.logprobs(samples))


GRAPH = trace(_flow, {"generator": "generator", "reward": "reward", "trainer": "trainer"}, name="a <flow>")


def test_mermaid_has_an_edge_for_every_input() -> None:
    lines = to_mermaid(GRAPH).splitlines()
    assert 'n0["generator.generate(temperature=0, stop=[&quot;&lt;&quot;])<br/>completion"]' in lines[2]
    assert lines[0] == "flowchart LR"
    assert [line.strip() for line in lines if "-->" in line] == ["input --> n0", "n0 --> n1", "n0 --> n2"]


def test_svg_is_well_formed_escapes_names_and_has_a_box_for_every_call() -> None:
    root = ElementTree.fromstring(to_svg(GRAPH))
    space = "{http://www.w3.org/2000/svg}"
    assert root.findtext(f"{space}title") == "flow a <flow>"
    assert len(root.findall(f"{space}rect")) == len(GRAPH.nodes) + 1
    labels = [text.text for text in root.findall(f"{space}text")]
    generate = 'generator.generate(temperature=0, stop=["<"])'
    assert {"input", generate, "reward.score", "trainer.logprobs", "+ trainer_logprobs"} <= set(labels)
    boxes = [(float(r.get("x", 0)), float(r.get("y", 0))) for r in root.findall(f"{space}rect")]
    assert len(set(boxes)) == len(boxes), "boxes lie on top of each other"


def _judged(prompts: Any, m: Any) -> Any:
    samples = m.game.rollout(prompts)
    return m.join(samples, m.reward.score(samples), m.style.score(samples, name="style"))


JUDGED = trace(
    _judged,
    dict.fromkeys(("reward", "style"), "reward")
    | {"game": "environment", "generator": "generator", "judge": "generator", "scorer": "trainer"},
    uses={"game": ["generator"], "reward": ["judge", "scorer"], "style": ["judge"]},
)


def test_mermaid_draws_the_roles_that_roles_use() -> None:
    lines = [line.strip() for line in to_mermaid(JUDGED).splitlines()]
    assert [line for line in lines if line.startswith("use_")] == [
        'use_generator(["generator<br/>generator"])',
        'use_judge(["judge<br/>generator"])',
        'use_scorer(["scorer<br/>trainer"])',
    ]
    assert [line for line in lines if "uses" in line] == [
        "n0 -. uses .-> use_generator",
        "n1 -. uses .-> use_judge",
        "n2 -. uses .-> use_judge",
        "n1 -. uses .-> use_scorer",
    ]
    assert "uses" not in to_mermaid(GRAPH)


def test_svg_draws_the_roles_that_roles_use_below_the_calls() -> None:
    root = ElementTree.fromstring(to_svg(JUDGED))
    space = "{http://www.w3.org/2000/svg}"
    boxes = root.findall(f"{space}rect")
    calls, used = [[b for b in boxes if bool(b.get("stroke-dasharray")) is dashed] for dashed in (False, True)]
    assert (len(calls), len(used)) == (len(JUDGED.nodes) + 1, 3), "a role that two rewards use has one box"
    assert min(float(b.get("y", 0)) for b in used) > max(float(b.get("y", 0)) for b in calls) + 56
    assert len({(b.get("x"), b.get("y")) for b in boxes}) == len(boxes), "boxes lie on top of each other"
    assert max(float(b.get("x", 0)) + float(b.get("width", 0)) for b in boxes) < float(root.get("width", 0))
    assert max(float(b.get("y", 0)) + 56 for b in boxes) < float(root.get("height", 0))
    dashed = [path for path in root.findall(f"{space}path") if path.get("stroke-dasharray")]
    assert len(dashed) == 4, "one for each role that uses another"
    assert {"judge", "scorer"} <= {text.text for text in root.findall(f"{space}text")}
    assert "stroke-dasharray" not in to_svg(GRAPH)


def test_an_empty_flow_has_a_picture_too() -> None:
    graph = trace(lambda examples, m: examples, {}, name="sft", given="demonstrations")
    ElementTree.fromstring(to_svg(graph))


def test_the_plugin_writes_the_picture_when_a_run_starts(tmp_path: Path) -> None:
    plugin.chatlearn_run_start(tmp_path, GRAPH)
    assert (tmp_path / "flow.svg").read_text() == to_svg(GRAPH)
