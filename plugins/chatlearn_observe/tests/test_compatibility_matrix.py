from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatlearn_core.exceptions import PluginError
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.records import GeneratorSpec, PluginRecord, TrainerSpec, WeightSyncSpec
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_observe.compatibility_matrix import (
    TestResult,
    compatibility_matrix,
    matrix_json,
    matrix_text,
    read_environment,
    read_tested,
)


def entry(record: PluginRecord, status: str = "ok", reason: str = "") -> PluginEntry:
    return PluginEntry(
        name=record.name,
        kind=record.kind,
        distribution=f"{record.name}-dist",
        version="1.0",
        status=status,
        reason=reason,
        record=record,
    )


REGISTRY = PluginRegistry(
    (
        entry(TrainerSpec(name="fsdp", factory="m:F", options="m:O")),
        entry(
            GeneratorSpec(name="far", factory="m:F", options="m:O", channels=frozenset({"checkpoint"})),
            "missing-engine",
            "needs far-engine; installed: none",
        ),
        entry(GeneratorSpec(name="near", factory="m:F", options="m:O"), "ok"),
        entry(GeneratorSpec(name="twice", factory="m:F", options="m:O"), "conflict", "..."),
        entry(WeightSyncSpec(name="direct", sender="m:S", receiver="m:R", options="m:O", reach="process")),
    )
)


def test_every_combination_once_with_its_reasons() -> None:
    far, near = compatibility_matrix(REGISTRY)
    assert (far.trainer, far.generator, far.weight_sync, far.fits) == ("fsdp", "far", "direct", False)
    assert far.reasons == (
        "transport 'direct' delivers by channel 'tensors' within one process; "
        "generator 'far' takes channels 'checkpoint'",
    )
    assert far.missing == ("far (far-dist 1.0): needs far-engine; installed: none",)
    assert (near.generator, near.fits, near.reach, near.reasons, near.missing) == ("near", True, "process", (), ())


def test_recorded_test_results_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "kit.json"
    result = {"trainer": "fsdp", "generator": "near", "weight_sync": "direct", "passed": False, "detail": "shape"}
    file.write_text(json.dumps({"results": [result]}))
    far, near = compatibility_matrix(REGISTRY, read_tested(file))
    assert far.tested is None
    assert near.tested == TestResult(passed=False, detail="shape")
    text = matrix_text([far, near])
    assert [line.split()[:3] for line in text.splitlines()[1:]] == [
        ["fsdp", "far", "direct"],
        ["fsdp", "near", "direct"],
    ]
    assert text.splitlines()[2].split("  ")[-2:] == ["failed", "shape"]
    combinations = json.loads(json.dumps(matrix_json([far, near])))["combinations"]
    assert combinations[1]["tested"] == {"passed": False, "detail": "shape"}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"results": [{"trainer": "a"}]}',
        '{"results": [{"trainer":"a","generator":"b","weight_sync":"c","passed":1}]}',
    ],
)
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "kit.json"
    file.write_text(content)
    with pytest.raises(PluginError, match="is not a recorded run") as caught:
        read_tested(file)
    assert str(file) in str(caught.value)


def test_the_table_tells_versions_and_how_a_combination_failed(tmp_path: Path) -> None:
    file = tmp_path / "kit.json"
    common = {"trainer": "fsdp", "weight_sync": "direct"}
    far = {**common, "generator": "far", "passed": True, "detail": "one case; another"}
    near = {**common, "generator": "near", "passed": False, "detail": "shape"}
    file.write_text(json.dumps({"environment": {"torch": "2.13.0"}, "results": [far, near]}))
    text = matrix_text(compatibility_matrix(REGISTRY, read_tested(file)), read_environment(file))
    assert text.splitlines()[-1] == "tested with torch 2.13.0; --json has the cases"
    assert "another" not in text
    assert "shape" in text


def test_versions_that_are_none_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "kit.json"
    file.write_text('{"environment": ["torch"], "results": []}')
    with pytest.raises(PluginError, match=r"kit\.json: environment is \['torch'\]; it must map"):
        read_environment(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="FileNotFoundError"):
        read_tested(tmp_path / "none.json")
