"""A report over damaged files is still written, and states what it left out."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

VALUES: list[Any] = [
    *(None, True, 0, -1, 10**30, 1e308, -0.5, "", "x", "nan", "</script>", "\ud800", [], {}, [1], [[]], {"a": []}),
    *([None], ["x", 3.5], [-1, 10**12], float("nan"), float("inf"), "a" * 5_000),
]


@pytest.fixture(scope="module")
def run_dir(tiny_model: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory, bounded_in: Any) -> Path:
    """What a run of three steps leaves, but for its weights."""
    folder = tmp_path_factory.mktemp("reported")
    content = {
        "output_dir": str(folder / "run"),
        "model": {"path": str(tiny_model)},
        "data": {"train": [{"path": str(sums)}], "eval": [{"path": str(sums), "limit": 2, "name": "held"}]},
        "algorithm": {"name": "grpo", "options": {"group_size": 2}},
        "roles": {
            "trainer": {"kind": "trainer", "backend": "fsdp"},
            "generator": {"kind": "generator", "backend": "transformers"},
            "reward": {"kind": "reward", "backend": "gsm8k"},
        },
        "sampling": {"max_tokens": 8},
        "train": {"steps": 3, "prompts_per_step": 2},
        "checkpoint": {"every": 0, "export": False},
        "log": {"progress": False},
    }
    outcome = bounded_in(folder)("configuration_target.py:train", yaml.safe_dump(content))
    assert outcome.end == "returned", outcome.output
    shutil.rmtree(folder / "run" / "checkpoints")
    return folder / "run"


def changed(value: Any, draw: random.Random) -> Any:
    """The value with something else somewhere in it."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.1:
        return draw.choice(VALUES)
    if isinstance(value, dict):
        key = draw.choice(list(value))
        return value | {draw.choice([key, key, key, "other", "step"]): changed(value[key], draw)}
    place = draw.randrange(len(value))
    return [*value[:place], changed(value[place], draw), *value[place + 1 :]]


def damage(file: Path, draw: random.Random) -> None:
    data = file.read_bytes()
    match draw.randrange(8):
        case 0:
            file.write_bytes(data[: draw.randrange(len(data) + 1)])
        case 1:
            spoiled = bytearray(data)
            for _ in range(draw.choice([1, 8, 100])):
                spoiled[draw.randrange(len(spoiled))] = draw.randrange(256)
            file.write_bytes(spoiled)
        case 2:
            file.unlink()
            file.mkdir()
        case 3:
            file.write_text(
                draw.choice(["[" * 100_000 + "\n", "{}\n[]\n3\nnull\n", "\0" * 100, '{"step": 1}', "9" * 9_000])
            )
        case _ if file.suffix == ".jsonl":
            lines = [json.loads(line) for line in data.splitlines()]
            lines = [changed(line, draw) if draw.random() < 0.5 else line for line in lines]
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        case _ if file.suffix == ".json":
            file.write_text(json.dumps(changed(json.loads(data), draw)))
        case _ if file.suffix == ".yaml":
            file.write_text(
                yaml.safe_dump(json.loads(json.dumps(changed(yaml.safe_load(data), draw)).replace("NaN", "0")))
            )


def test_a_report_over_damaged_files_says_what_it_left_out(
    cases: Any, run_dir: Path, tmp_path: Path, bounded: Any
) -> None:
    for case in cases(quick=16):
        copy = tmp_path / "run"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run_dir, copy)
        files = sorted(path for path in copy.rglob("*.*") if path.suffix in (".jsonl", ".json", ".yaml", ".svg"))
        for file in case.random.sample(files, case.random.choice([1, 1, 2, 4])):
            damage(file, case.random)
        outcome = bounded("report_target.py:write", str(copy))
        assert outcome.end == "returned", f"{outcome.output:.6000}"
        assert "refused" in outcome.value or outcome.value["bytes"] > 1_000
