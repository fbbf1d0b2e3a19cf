"""Where the processes of a run listen: on loopback, or on the list below, which SECURITY.md explains.

Runs with engines are watched where they are made: ``test_engine_runs.py``, and the packages' own tests of tensor
parallelism.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from chatlearn_data.arithmetic import problems, prompt_records
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_testing.listeners import Listener, family, listeners, reached_from_outside

LIMIT_S = 600
LOOK_S = 0.2
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 97 / 97
"""
RAY = ("/ray/", "ray::RuntimeEnvAgent", "ray::DashboardAgent")
"""Ray's own processes. They ask for Ray's token."""


def run_and_watch(directory: Path, roles: Mapping[str, Any], **settings: Any) -> set[Listener]:
    """Train for two steps in a process of its own; every socket that it or its children listened at meanwhile."""
    model = build_tiny_model(directory / "model", hidden=128)
    rows = prompt_records(problems(), "train", 8, 7)
    records = [{"id": row["id"], "prompt": row["prompt"][0]["content"], "ground_truth": "7"} for row in rows]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (directory / "reward.py").write_text(REWARD)
    reward = {"path": f"{directory / 'reward.py'}:compute_score", "num_workers": 1}
    config = {
        "output_dir": str(directory / "run"),
        "model": {"path": str(model)},
        "data": {
            "train": [{"path": str(directory / "prompts.jsonl"), "format": "prompt"}],
            "apply_chat_template": False,
        },
        "algorithm": {"name": "grpo", "options": {"group_size": 4}},
        "roles": {
            "trainer": {"kind": "trainer", "backend": "fsdp", "device": "cpu", **roles.get("trainer", {})},
            "generator": {"kind": "generator", "device": "cpu", **roles["generator"]},
            "reward": {"kind": "reward", "backend": "function", "options": reward},
        },
        "sampling": {"max_tokens": 8},
        "train": {"steps": 2, "prompts_per_step": 4},
        "checkpoint": {"export": False},
        "log": {"progress": False},
        **settings,
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(config))
    environment = {key: value for key, value in os.environ.items() if key != "RAY_AUTH_MODE"}
    run = subprocess.Popen(
        [sys.executable, "-m", "chatlearn_cli.main", "run", str(directory / "run.yaml")],
        stdout=(directory / "output").open("w"),
        stderr=subprocess.STDOUT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        cwd=directory,
    )
    found: set[Listener] = set()
    deadline = time.monotonic() + LIMIT_S
    try:
        while run.poll() is None:
            assert time.monotonic() < deadline, (directory / "output").read_text()[-4000:]
            found |= listeners(family(run.pid))
            time.sleep(LOOK_S)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 0, (directory / "output").read_text()[-4000:]
    return found


@pytest.mark.engine
@pytest.mark.slow
def test_local_runtime(tmp_path: Path) -> None:
    found = run_and_watch(tmp_path, {"generator": {"backend": "transformers"}}, weight_sync={"backend": "broadcast"})
    assert not reached_from_outside(found)
    assert found, "the control path and the group of a broadcast listen, so it was looked at"


@pytest.mark.engine
@pytest.mark.slow
def test_ray_with_two_ranks(tmp_path: Path) -> None:
    found = run_and_watch(
        tmp_path,
        {"trainer": {"ranks": 2}, "generator": {"backend": "transformers"}},
        runtime={"backend": "ray", "options": {"object_store_mb": 100}},
        weight_sync={"backend": "broadcast"},
    )
    ours = {
        (one.process, one.port)  # a worker's command is renamed by what it does
        for one in found
        if not one.is_local and not any(name in one.command for name in RAY)
    }
    servers = Counter(process for process, _ in ours)
    assert set(servers.values()) == {1}, "Ray's server in the driver and in every worker, which asks for Ray's token"
    assert {one.kind for one in found if not one.is_local} == {"tcp"}
