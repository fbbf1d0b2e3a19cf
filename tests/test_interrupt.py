"""Ctrl-C stops a run cleanly at once, says how to continue and leaves no process; the resumed run ends the same."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatlearn_testing.processes import session_members

pytestmark = pytest.mark.engine

INTERRUPTED = 130


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    return {}


@pytest.fixture
def expected(undisturbed: dict[str, Any], recipe: Any, chatlearn: Any, result_of: Any) -> Any:
    if not undisturbed:
        directory = recipe.file.parent / "undisturbed"
        assert chatlearn("run", recipe.file, f"output_dir={directory}").code == 0
        undisturbed["result"] = result_of(directory)
    return undisturbed["result"]


@pytest.mark.parametrize(
    ("moment", "every", "number"),
    [
        ("completion:30", 0, signal.SIGINT),  # while step 3 generates: step 2 is still in memory, and is saved
        ("update:10", 1, signal.SIGTERM),  # between two updates of step 3: they are made again
        ("metrics:3", 0, signal.SIGINT),  # step 3's line is written
        ("save:2", 1, signal.SIGINT),  # a checkpoint that was begun is finished
    ],
)
def test_the_first_stops_cleanly_and_the_run_goes_on_as_if_nothing_had_been(
    moment: str,
    every: int,
    number: signal.Signals,
    recipe: Any,
    start: Callable[..., Any],
    chatlearn: Any,
    result_of: Any,
    expected: Any,
) -> None:
    settings = (f"checkpoint.every={every}",)
    stopped = start("run", recipe.file, *settings, PROBE=moment, PROBE_SIGNAL=str(int(number))).wait()
    assert stopped.code == INTERRUPTED, stopped.output
    assert "Traceback" not in stopped.output
    said = re.search(r"(?m)^stopped after step (\d)\. A checkpoint of step (\d) is in ", stopped.output)
    assert said is not None, stopped.output
    assert said.group(1) == said.group(2) != "0", "no complete step is lost"
    assert stopped.output.strip().endswith("Run the same command again to continue")
    assert session_members(stopped.pid) == []
    resumed = chatlearn("run", recipe.file, *settings)
    assert resumed.code == 0, resumed.output
    assert f"resuming after step {said.group(1)}" in resumed.output
    assert result_of(recipe.run_dir) == expected


def test_before_the_first_step_it_says_that_it_starts_anew(recipe: Any, chatlearn: Any) -> None:
    stopped = chatlearn("run", recipe.file, PROBE="synced:1", PROBE_SIGNAL=str(int(signal.SIGINT)))
    assert stopped.code == INTERRUPTED, stopped.output
    assert "stopped after step 0. No step was complete yet, so it starts from the beginning." in stopped.output


def test_while_a_resumed_run_starts_nothing_is_lost_and_it_says_so(recipe: Any, chatlearn: Any) -> None:
    assert chatlearn("run", recipe.file, PROBE="saved:2").code == -signal.SIGKILL
    stopped = chatlearn("run", recipe.file, PROBE="start:1", PROBE_SIGNAL=str(int(signal.SIGINT)))
    assert stopped.code == INTERRUPTED, stopped.output
    assert "stopped after step 2. A checkpoint of step 2 is in" in stopped.output


def test_the_second_ends_the_process_at_once(recipe: Any, start: Callable[..., Any]) -> None:
    # The reward blocks the whole process, so that the first Ctrl-C cannot be attended to.
    recipe.content["roles"]["reward"]["backend"] = "blocking"
    recipe.write()
    process = start("run", recipe.file)
    process.wait_for("the reward blocks")
    process.signal(signal.SIGINT)
    process.wait_for("once more ends the process at once")
    process.signal(signal.SIGINT)
    assert process.wait().code == -signal.SIGINT
    assert session_members(process.pid) == []


def test_the_worker_processes_of_rewards_end_with_the_run(
    recipe: Any, start: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "slow_reward.py").write_text(
        "import time\ndef score(data_source, solution_str, ground_truth, extra_info=None):\n    time.sleep(600)\n"
    )
    recipe.content["roles"]["reward"] = {
        "kind": "reward",
        "backend": "function",
        "options": {"path": f"{tmp_path}/slow_reward.py:score"},
    }
    recipe.write()
    process = start("run", recipe.file)
    process.wait_for("run directory:")
    process.signal(signal.SIGINT)
    stopped = process.wait()
    assert stopped.code == INTERRUPTED, stopped.output
    assert session_members(process.pid) == []


@pytest.mark.slow
def test_a_process_of_its_own_from_the_start(recipe: Any, environment: dict[str, str]) -> None:
    """Without the forking server."""
    process = subprocess.Popen(
        [sys.executable, "-m", "chatlearn_cli.main", "run", str(recipe.file)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "run directory:" in line:
            break
    process.send_signal(signal.SIGINT)
    output = process.stdout.read()
    assert process.wait() == INTERRUPTED, output
    assert "Run the same command again to continue" in output
    assert session_members(process.pid) == []
