"""``chatlearn eval`` over several models: what it picks, refuses and writes."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from chatlearn_cli.evaluate import _checkpoints, _only_sets, _print_table, _with_model
from chatlearn_cli.evaluation_plot import Panel, Point, plot, ticks
from chatlearn_cli.evaluation_results import Evaluated, as_csv, as_panels, write_results
from chatlearn_core.config.load import load_config
from chatlearn_core.exceptions import ChatLearnError, CheckpointError, ConfigError
from chatlearn_core.executor.checkpoint import CheckpointStore
from chatlearn_core.plugins.loader import discover_plugins

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2 and 10."""
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=5, keep_best=0)
    for step in (2, 10):
        with store.write(step, {"config": {"train": {"steps": 10}}}) as directory:
            (directory / "weights").write_text(str(step))
    return tmp_path


def evaluated(step: int | None, value: float, **metrics: float) -> Evaluated:
    name = "other/model" if step is None else f"step {step}"
    interval = {"eval/pass@4/low": value - 0.1, "eval/pass@4/high": value + 0.1}
    return Evaluated(name, step, f"/runs/{name}", {"eval/pass@4": value, "eval/samples": 8.0, **interval, **metrics})


FOUND = [evaluated(2, 0.3), evaluated(10, 0.5), evaluated(None, 0.4, **{"eval/nll": 1.25})]


@pytest.mark.parametrize(
    ("wanted", "steps"), [("all", [2, 10]), ("10", [10]), ("10, 2", [2, 10]), ("step_2", [2]), ("step_00000010", [10])]
)
def test_checkpoints_are_named_by_step(run_dir: Path, wanted: str, steps: list[int]) -> None:
    assert [checkpoint.step for checkpoint in _checkpoints(wanted, run_dir)] == steps


def test_a_path_of_this_run_names_a_checkpoint_and_one_of_another_run_does_not(run_dir: Path) -> None:
    assert [c.step for c in _checkpoints(str(run_dir / "checkpoints" / "step_00000002"), run_dir)] == [2]
    with pytest.raises(ConfigError, match=r"not a checkpoint of this run .*it has steps 2, 10"):
        _checkpoints(str(run_dir / "other" / "checkpoints" / "step_00000002"), run_dir)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("3", "no complete checkpoint of step 3; it has steps 2, 10"),
        ("last", "names 'last', which is not a checkpoint"),
        (" , ", "names no checkpoint; write all, or steps"),
    ],
)
def test_what_is_no_checkpoint_is_refused(run_dir: Path, wanted: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _checkpoints(wanted, run_dir)


def test_a_run_without_checkpoints_and_a_damaged_one_are_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        _checkpoints("all", tmp_path / "new")
    (run_dir / "checkpoints" / "step_00000010" / "weights").write_text("11")
    with pytest.raises(CheckpointError, match="weights changed"):
        _checkpoints("all", run_dir)


def test_sets_are_picked_by_name() -> None:
    sets = tuple(SimpleNamespace(name=name) for name in ("", "aime", "gsm8k"))
    loaded = SimpleNamespace(source="run.yaml")
    assembly: Any = _Assembly(loaded, sets)
    with pytest.raises(ConfigError, match=r"run.yaml has the evaluation sets eval, aime, gsm8k .*Did you mean 'aime'"):
        _only_sets(assembly, ["aimee"])
    assert _only_sets(assembly, None) is assembly


class _Assembly:
    def __init__(self, loaded: Any, evaluations: Any) -> None:
        self.loaded, self.evaluations = loaded, evaluations


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"model": "trained", "reference": "base", "trainer": None}),
        ({"reference": "other"}, {"model": "trained", "reference": "other", "trainer": None}),
        ({"trainer": "other"}, {"model": "trained", "reference": "base", "trainer": "trained"}),
    ],
)
def test_only_the_trained_role_has_the_evaluated_model(tmp_path: Path, own: Any, expected: Any) -> None:
    (tmp_path / "pairs.jsonl").write_text("")
    for name in ("base", "trained", "other"):
        (tmp_path / name).mkdir()
    roles: dict[str, Any] = {name: {"kind": "trainer", "backend": "fsdp"} for name in ("trainer", "reference")}
    for name, model in own.items():
        roles[name]["model"] = {"path": str(tmp_path / model)}
    content = {
        "output_dir": str(tmp_path / "run"),
        "model": {"path": str(tmp_path / "base"), "max_length": 64},
        "data": {"train": [{"path": str(tmp_path / "pairs.jsonl"), "format": "preference"}]},
        "algorithm": {"name": "dpo"},
        "roles": roles,
        "train": {"steps": 1, "prompts_per_step": 1},
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(content))
    registry = discover_plugins()
    config = _with_model(load_config(file, (), registry), file, None, str(tmp_path / "trained"), registry).config
    models = {"model": config.model, **{name: role.model for name, role in config.roles.items()}}
    assert {name: model and Path(model.path).name for name, model in models.items()} == expected
    assert all(model is None or model.max_length == 64 for name, model in models.items() if name not in own)


def test_files_hold_every_model_and_metric(tmp_path: Path) -> None:
    names = [file.name for file in write_results(tmp_path / "out", FOUND)]
    assert names == ["metrics.json", "metrics.csv", "metrics.svg"]
    content = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert [one["metrics"]["eval/pass@4"] for one in content["evaluations"]] == [0.3, 0.5, 0.4]
    rows = list(csv.DictReader(io.StringIO(as_csv(FOUND))))
    assert [row["metric"] for row in rows if row["step"] == "10"] == ["eval/pass@4", "eval/samples"]
    assert (rows[0]["value"], rows[0]["low"], rows[0]["high"]) == ("0.3", "0.19999999999999998", "0.4")
    (tmp_path / "file").write_text("")
    with pytest.raises(ChatLearnError, match="--output"):
        write_results(tmp_path / "file", FOUND)


def test_the_table_has_a_line_per_metric_and_model(capsys: pytest.CaptureFixture[str]) -> None:
    _print_table(FOUND)
    shown = [line.split() for line in capsys.readouterr().out.splitlines() if "step" in line]
    assert ["eval/pass@4", "│", "step", "2", "│", "0.3000", "│", "0.2000", "│", "0.4000"] in shown


def test_the_picture_places_values_to_scale() -> None:
    root = ElementTree.fromstring(plot(as_panels(FOUND)))
    panels = root.findall(f"{SVG}g")
    assert [panel.findtext(f"{SVG}text") for panel in panels] == ["nll", "pass@4"]  # no counts
    last, first = panels[1].findall(f"{SVG}circle")
    [model] = panels[1].findall(f"{SVG}rect")
    assert float(first.get("cx", "")) < float(last.get("cx", "")) < float(model.get("x", ""))
    heights = [float(dot.get("cy", "")) for dot in (first, last)]
    middle = float(model.get("y", "")) + 3.5
    assert middle == pytest.approx(sum(heights) / 2, abs=0.11)  # 0.4 between 0.3 and 0.5
    assert first.findtext(f"{SVG}title") == "step 2: 0.3 [0.2, 0.4]"


@pytest.mark.parametrize("values", [[0.0], [1.0, 1.0], [float("nan")], [-3.0, 1e6], [1e-9, 2e-9]])
def test_any_numbers_make_a_picture(values: list[float]) -> None:
    points = [Point(f"<step {i}>", i, value) for i, value in enumerate(values)]
    root = ElementTree.fromstring(plot([Panel("a<b>&", points)]))
    assert "nan" not in ElementTree.tostring(root, encoding="unicode").replace("no finite value", "")


def test_ticks_are_round_and_span_the_values() -> None:
    assert ticks(0.2, 0.6) == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6])
    assert ticks(0.0, 1.0) == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert ticks(-7.0, 13.0) == pytest.approx([-10.0, -5.0, 0.0, 5.0, 10.0, 15.0])
