"""Where Ray really puts what belongs together, and the user's code on a machine that does not have it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(800)]


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    program = Path(__file__).with_name("two_machines.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path_factory.mktemp("machines"))],
        check=False,
        capture_output=True,
        text=True,
        timeout=700,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_ranks_that_talk_in_every_layer_share_a_node(happened: dict[str, Any]) -> None:
    """Packed one by one, three of the four ranks would fill a node with three GPUs."""
    first, second, third, fourth = happened["pairs"]["trainer"]
    assert first == second
    assert third == fourth
    assert first != third


def test_an_engine_of_two_devices_sits_on_one_node_that_has_them(happened: dict[str, Any]) -> None:
    [engine] = happened["pairs"]["engine"]
    assert engine not in happened["pairs"]["trainer"], "each node of a pair has one GPU left"


def test_generators_sit_next_to_their_trainer(happened: dict[str, Any]) -> None:
    assert len({*happened["neighbours"]["generator"], *happened["neighbours"]["trainer"]}) == 1


def test_a_users_reward_works_where_its_directory_is_not(happened: dict[str, Any]) -> None:
    assert happened["scores"] == [28.0]


def test_a_job_of_a_cluster_runs_there(happened: dict[str, Any]) -> None:
    """The process that ``ray job submit`` starts finds its cluster in RAY_ADDRESS."""
    [line] = happened["job"]
    assert line["samples/trained"] == 16
    assert line["perf/driver_bytes"] > 0
