"""The quickstart, as ``make demo`` runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "examples" / "demo" / "demo.py"
LEAST_RISE = 0.15


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.learning) for seed in (1, 2))])
def test_held_out_accuracy_rises(seed: int, tmp_path: Path) -> None:
    """On problems in neither training file: the program asserts that itself, and this test reads the files again."""
    finished = subprocess.run(
        [sys.executable, str(DEMO), "--seed", str(seed), "--directory", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    directory = tmp_path / "demo"
    accuracy = json.loads((directory / "grpo" / "summary.json").read_text())["eval/accuracy"]
    assert accuracy["after"] - accuracy["before"] >= LEAST_RISE, accuracy
    assert re.search(r"Held-out accuracy: \d+\.\d% -> \d+\.\d%", finished.stdout)
    assert "report.html" in finished.stdout
    assert (directory / "grpo" / "report.html").stat().st_size > 10_000
    assert not _problems(directory / "data", "heldout") & _problems(directory / "data", "train", "sft", "validation")


def _problems(directory: Path, *names: str) -> set[tuple[str, int, int]]:
    """(operation, operands) of every row; the order of a sum's operands does not matter."""
    found = set()
    for name in names:
        for line in (directory / f"{name}.jsonl").read_text().splitlines():
            info = json.loads(line)["extra_info"]
            operands = (info["left"], info["right"])
            found.add((info["operation"], *(sorted(operands) if info["operation"] == "add" else operands)))
    return found
