"""The page as a file: self-contained, whole, and nothing in it escapes."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from chatlearn_observe.report import ReportSettings, write_report
from chatlearn_observe.report.page import json_for_html

SECTIONS = ["overview", "curves", "time", "rollouts", "events", "setup"]
SVG_NAMESPACE = "http://www.w3.org/2000/svg"
VOID = {"meta", "input", "img", "br", "link"}


class Page(HTMLParser):
    """Elements with attributes, text of scripts and styles, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in self.raw:
            self.raw[tag].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.raw:
            self.raw[self.open[-1]][-1] += data
        else:
            self.text += data

    @property
    def data(self) -> Any:
        return json.loads(self.raw["script"][0])

    def attributes(self, name: str) -> list[str]:
        return [value or "" for _, attributes in self.elements for key, value in attributes.items() if key == name]


@pytest.fixture
def page(run_dir: Path, characters: None) -> Page:
    return Page(write_report(run_dir).path.read_text(encoding="utf-8"))


def test_it_is_well_formed_and_has_every_section_once(page: Page) -> None:
    assert page.open == []
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    assert [name for name in ids if name in SECTIONS] == SECTIONS
    targets = {link.removeprefix("#") for link in page.attributes("href")}
    assert set(SECTIONS) <= targets <= set(ids)


def test_nothing_comes_from_outside(page: Page, run_dir: Path) -> None:
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    assert set(re.findall(r"\w+://[^\s\"'<)]+", text)) <= {SVG_NAMESPACE}
    assert all(address.startswith(("#", "data:")) for name in ("href", "src") for address in page.attributes(name))
    assert not {"link", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.elements}
    assert "@import" not in page.raw["style"][0]
    assert "fetch(" not in page.raw["script"][1]


def test_the_policy_allows_only_these_scripts_and_styles(page: Page) -> None:
    [policy] = [a["content"] or "" for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for text in (page.raw["script"][1], page.raw["style"][0]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert page.attributes("style") == []
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_the_data_are_those_of_the_files(page: Page, run_dir: Path) -> None:
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    data = page.data
    assert data["steps"] == [record["step"] for record in metrics]
    for name, column in data["metrics"].items():
        for value, record in zip(column, metrics, strict=True):
            expected = record.get(name)
            assert value == (pytest.approx(expected, rel=1e-6) if isinstance(expected, float) else expected)
    recorded = {
        (file.name.split("_")[0], record["step"], record["id"]): record
        for file in (run_dir / "rollouts").iterdir()
        for record in map(json.loads, file.open(encoding="utf-8"))
    }
    assert len(data["rollouts"]["samples"]) == len(recorded)
    for sample in data["rollouts"]["samples"]:
        group = data["rollouts"]["groups"][sample["group"]]
        record = recorded[group["kind"], group["step"], sample["id"]]
        assert (group["prompt"], group["truth"]) == (record["prompt"], record["ground_truth"])
        assert (sample["text"], sample["reward"], sample["parts"]) == (
            record["completion"],
            record["reward"],
            record["reward_components"],
        )
        assert "".join(data["rollouts"]["pieces"][token] for token in sample["tokens"]) == record["completion"]


def test_hostile_text_stays_text(page: Page) -> None:
    assert len(page.raw["script"]) == 2
    assert "stolen" not in page.raw["script"][1]
    assert any("</script><script>" in (s["text"] or "") for s in page.data["rollouts"]["samples"])
    assert "</script><script>document.title='stolen'" in page.text  # the event, shown as it stands
    assert "sums <grpo>" in page.text
    assert "b" not in {tag for tag, _ in page.elements}


def test_the_flow_is_a_picture_that_can_run_nothing(page: Page, run_dir: Path) -> None:
    [source] = page.attributes("src")
    kind, _, content = source.partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(content) == (run_dir / "flow.svg").read_bytes()


def test_controls_have_names(page: Page) -> None:
    labels = 0
    open_label = False
    for tag, attributes in page.elements:
        open_label = tag == "label" or (open_label and tag in {"input", "select", "option", "output"})
        labels += tag == "label"
        if tag in {"input", "select"}:
            assert open_label or attributes.get("aria-label")
    assert labels >= 8


def test_unreadable_files_are_reported(run_dir: Path) -> None:
    (run_dir / "summary.json").write_text("{")
    written = write_report(run_dir, settings=ReportSettings(token_text=False))
    assert "summary.json cannot be read" in written.notes[0]
    assert "summary.json cannot be read" in Page(written.path.read_text(encoding="utf-8")).text


def test_surrogates_and_infinities_survive(run_dir: Path) -> None:
    file = run_dir / "rollouts" / "step_000001.jsonl"
    record = json.loads(file.read_text(encoding="utf-8").splitlines()[0]) | {
        "completion": "half \ud83d",
        "reward": 1e308 * 10,
    }
    file.write_text(json.dumps(record) + "\n", encoding="utf-8")
    data = Page(write_report(run_dir, settings=ReportSettings(token_text=False)).path.read_text(encoding="utf-8")).data
    [sample] = [s for s in data["rollouts"]["samples"] if s["text"] == "half \ud83d"]
    assert sample["reward"] == "Infinity"


@pytest.mark.parametrize("text", ["</script>", "<!--", "a&b", "\u2028\u2029", 'quote " \\ ', "日本🙂"])
def test_json_in_a_script_element(text: str) -> None:
    written = json_for_html({"text": text})
    assert json.loads(written) == {"text": text}
    assert not set("<>&\u2028\u2029") & set(written)


def test_the_assets_cannot_end_their_element() -> None:
    for asset in (files("chatlearn_observe.report") / "assets").iterdir():
        if asset.name.endswith((".js", ".css")):
            assert "</s" not in asset.read_text(encoding="utf-8")
