"""The Ray that a run started is lost: the run ends with a sentence, a page and an exit code, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import write_distribution
from .fault_run import FROZEN, HEARTBEAT_S
from .test_fault_grid import MODULE, PROGRAM, Cell, Scene
from .test_real_run import ALL_GONE_S, marked_processes

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("leaves_nothing")]


@pytest.fixture
def cell(tmp_path: Path) -> Iterator[Cell]:
    site = tmp_path / "site"
    site.mkdir()
    write_distribution(site, "1.0", MODULE, "fault_backends.py")
    sys.path.append(str(site))
    yield Scene(tmp_path, site).cell("run")
    sys.path.remove(str(site))
    sys.modules.pop(MODULE, None)


@pytest.mark.parametrize(
    ("target", "phase", "reason"),
    [
        pytest.param("raylet", "generating", "has ended", marks=pytest.mark.grid),
        (FROZEN + "raylet", "updating", f"has been stopped (SIGSTOP) for {HEARTBEAT_S:g} s"),
    ],
)
def test_a_run_whose_raylet_is_gone_says_so(cell: Cell, target: str, phase: str, reason: str) -> None:
    mark = uuid.uuid4().hex
    arguments = [cell.scene.site, cell.faults.path, cell.config, target, phase]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, arguments), f"runtime.options.heartbeat_timeout_s={HEARTBEAT_S}"],
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CHATLEARN_TEST_MARK": mark},
        capture_output=True,
        text=True,
        timeout=200,
    )
    [sprung] = cell.faults.sprung()
    assert done.returncode != 0
    page = (cell.run_dir / "failure.md").read_text()
    for said in (page, done.stderr):
        assert "Ray (started by this run) is lost on node" in said
        assert f"its raylet (process {sprung['pids'][0]}) {reason}" in said
        assert "Run the same command again" in said
    if target == "raylet":  # where it was stopped, the driver may hang in Ray, and the guard speaks in its place
        summary = json.loads((cell.run_dir / "summary.json").read_text())
        assert (summary["status"], "RuntimeLostError" in summary["error"]) == ("failed", True)
    deadline = time.monotonic() + ALL_GONE_S
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
