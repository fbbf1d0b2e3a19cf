"""Whatever the storage of a run's directory does, and whenever: the run ends with a sentence, and what it left is the
run that goes on, bit for bit.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

KINDS = ("EIO", "ENOSPC", "EROFS", "full", "kill")
NO_FAULT = {"kind": "none", "at": 0, "num_operations": 0, "num_bytes": 0}
FOR_EVER = 10**9


@pytest.fixture
def small_recipe(recipe: Any) -> Any:
    """Two steps, so that a case is short."""
    recipe.content["train"] = {"steps": 2, "prompts_per_step": 2}
    del recipe.content["roles"]["reference"]
    recipe.content["algorithm"]["options"] = {"group_size": 2}
    recipe.content["log"] = {"progress": False}
    for role in ("trainer", "generator"):
        recipe.content["roles"][role]["backend"] = {"trainer": "fsdp", "generator": "transformers"}[role]
    return recipe


@pytest.fixture
def train(bounded: Any, small_recipe: Any, tmp_path: Path) -> Callable[..., Any]:
    """Runs in a directory of this name, with a fault of its storage."""

    def run(name: str, fault: dict[str, Any]) -> Any:
        directory = tmp_path / name
        small_recipe.content["output_dir"] = str(directory)
        order = {"file": str(small_recipe.write()), "directory": str(directory), "fault": fault}
        return bounded("storage_target.py:train", order, timeout_s=120.0)

    return run


def test_a_run_on_failing_storage_loses_nothing(
    cases: Any, train: Any, result_of: Callable[[Path], Any], tmp_path: Path
) -> None:
    undisturbed = train("undisturbed", NO_FAULT)
    assert undisturbed.value["code"] == 0, undisturbed.output
    expected, count = result_of(tmp_path / "undisturbed"), undisturbed.value["count"]
    assert count > 100

    for case in cases(quick=4):
        draw = case.random
        fault = {
            "kind": KINDS[case.number % len(KINDS)],
            "at": draw.randrange(1, count),
            "num_operations": draw.choice([1, 1, draw.randrange(2, 20), FOR_EVER]),
            "num_bytes": draw.choice([0, draw.randrange(1, 2000), draw.randrange(2000, 300_000)]),
        }
        name = f"case{case.number}"
        failed = train(name, fault)
        if fault["kind"] == "kill":
            assert (failed.end, failed.code) == ("killed", -9), (fault, failed.output)
        else:
            assert failed.end == "returned", (fault, failed.output)
            assert failed.value["code"] in (0, 2), (fault, failed.output)
        told = [] if fault["kind"] == "full" else ["error: "]  # the log is limited, too
        if failed.end == "returned" and failed.value["code"] == 2:
            assert all(text in failed.output for text in told), (fault, failed.output)
        assert "Traceback" not in failed.output, (fault, failed.output)

        if failed.end == "returned" and failed.value["code"] == 0:
            assert result_of(tmp_path / name) == expected, fault
        resumed = train(name, NO_FAULT)
        assert resumed.end == "returned", (fault, resumed.output)
        if resumed.value["code"] != 0:
            assert "is complete: it made 2 of 2 steps" in resumed.output, (fault, failed.output, resumed.output)
        assert result_of(tmp_path / name) == expected, (fault, failed.output, resumed.output)
        hidden = {path.name for path in (tmp_path / name).rglob(".*")}
        assert hidden == {".lock"}, (fault, hidden)


def damage(draw: random.Random, file: Path) -> str:
    """What a disk or a person does to a file; says what."""
    content = file.read_bytes()
    match draw.choice(["cut", "flipped", "garbage", "gone", "directory", "empty"]):
        case "cut":
            file.write_bytes(content[: draw.randrange(len(content) + 1)])
            return "cut"
        case "flipped" if content:
            position = draw.randrange(len(content))
            file.write_bytes(
                content[:position] + bytes([content[position] ^ 1 << draw.randrange(8)]) + content[position + 1 :]
            )
            return f"bit flipped in byte {position}"
        case "garbage":
            file.write_bytes(
                draw.choice([b"[" * 50_000, draw.randbytes(100), b"null\n", b'{"step": 1}\n', b"\xff\xfe\n"])
            )
            return "garbage"
        case "gone":
            file.unlink()
            return "gone"
        case "directory":
            file.unlink()
            file.mkdir()
            return "a directory in its place"
    file.write_bytes(b"")
    return "empty"


def test_a_run_whose_files_were_damaged_goes_on_or_says_why_not(
    cases: Any, train: Any, result_of: Callable[[Path], Any], tmp_path: Path
) -> None:
    undisturbed = train("undisturbed", NO_FAULT)
    expected, count = result_of(tmp_path / "undisturbed"), undisturbed.value["count"]
    killed = train("killed", {"kind": "kill", "at": count * 3 // 4, "num_operations": 1, "num_bytes": 0})
    assert killed.end == "killed"
    files = sorted(path.relative_to(tmp_path / "killed") for path in (tmp_path / "killed").rglob("*") if path.is_file())

    for case in cases(quick=4):
        draw = case.random
        name, file = f"case{case.number}", draw.choice(files)
        shutil.copytree(tmp_path / "killed", tmp_path / name)
        what = f"{file}: {damage(draw, tmp_path / name / file)}"
        resumed = train(name, NO_FAULT)
        assert resumed.end == "returned", (what, resumed.output)
        assert "Traceback" not in resumed.output, (what, resumed.output)
        if resumed.value["code"] != 0:
            assert resumed.value["code"] == 2, (what, resumed.output)
            assert "error: " in resumed.output, (what, resumed.output)
            continue
        if file.parts[0] == "rollouts":  # nothing else knows what it held
            assert (tmp_path / name / "model" / "model.safetensors").read_bytes() == expected.model, what
            continue
        result = result_of(tmp_path / name)
        assert result.model == expected.model, (what, resumed.output)
        assert result.totals == expected.totals, (what, resumed.output)
        if file.name != "metrics.jsonl":  # lost lines stay lost, and the run reports it
            assert result == expected, (what, resumed.output)
