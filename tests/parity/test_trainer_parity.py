"""Every trainer in every layout takes the steps of plain transformers: makes ``docs/trainer-parity.md``
(``make test-parity``).
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from trainer_parity import MODELS, TOLERANCES, Layout, run, write_table

pytestmark = [pytest.mark.parity, pytest.mark.engine]


@pytest.mark.timeout(3600)
def test_every_trainer_and_layout(tmp_path: Path) -> None:
    rows: dict[str, list[tuple[Layout, dict[str, float]]]] = {}
    for model in MODELS:
        rows[model] = []
        for layout, worst in run(model, tmp_path):
            rows[model].append((layout, worst))
            print(model, layout.trainer, layout.name, worst, flush=True)
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    )
    write_table(rows, described.stdout.strip(), time.strftime("%Y-%m-%d"))
    wrong = [
        f"{model} on {layout.trainer} ({layout.name}): {name} {worst[name]:.1e}"
        for model, found in rows.items()
        for layout, worst in found
        for name, limit in TOLERANCES.items()
        if not worst[name] <= limit
    ]
    assert not wrong, "\n".join(wrong)
