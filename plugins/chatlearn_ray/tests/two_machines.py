"""Places and the user's code on a cluster of three nodes with imagined GPUs. A program of its own: Ray is joined once a
process. Prints one JSON line with what happened.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster as RayCluster
from small_run import write_run  # beside this program

from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.runtime.plan import BackendPlan, RolePlan, RunPlan
from chatlearn_core.types import RAW_BASIS, Completion, Prompt, SamplingParams, sample_from_completion
from chatlearn_ray import runtime as runtime_module
from chatlearn_ray.cluster import Cluster
from chatlearn_ray.options import RayRuntimeOptions
from chatlearn_ray.placement import PlacedRole, place_roles
from chatlearn_ray.runtime import RayRuntime
from chatlearn_workers.user_code import collect_code

SMALL: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 10**8}
REWARD = """
from alphabet import SIZE

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return SIZE * len(solution_str)
"""


async def nodes_of_placements(address: str, roles: Sequence[PlacedRole]) -> dict[str, list[str]]:
    """Reserve places for these roles; the node of every worker, by role."""
    options = RayRuntimeOptions(address=address, resource_wait_s=120)
    placement_plan = place_roles(roles, options)
    cluster = Cluster(options)
    await cluster.reserve(placement_plan)
    tables = {
        name: ray.util.placement_group_table(group)["bundles_to_node_id"] for name, group in cluster._groups.items()
    }
    places = {role.name: [tables[s.group][s.bundle] for s in placement_plan.of(role.name)] for role in roles}
    cluster.leave()
    while ray.available_resources().get("GPU") != ray.cluster_resources()["GPU"]:
        await asyncio.sleep(0.2)  # places are given back in the background
    return places


async def score_elsewhere(address: str, folder: Path) -> list[float | None]:
    """Score with a function of the user's, on a machine that does not have the user's directory."""
    directory = folder / "mine"
    directory.mkdir()
    (directory / "score.py").write_text(REWARD)
    (directory / "alphabet.py").write_text("SIZE = 7\n")
    os.chdir(directory)

    def collect_and_hide(place: Path) -> Any:
        """From here on no worker finds the directory, as if it were on the driver's machine only."""
        code = collect_code(place)
        directory.rename(folder / "hidden")
        return code

    runtime_module.collect_code = collect_and_hide  # type: ignore[assignment]  # the same signature
    registry = discover_plugins()
    record = registry.select("reward", "function")
    options = registry.load_options(record)(path="score.py:compute_score", num_workers=1)
    backend = BackendPlan("roles.reward", record, options)
    role = RolePlan("reward", "reward", (backend,), None, "lm", "cpu", 1, 1, False, {}, 60.0)
    runtime = RayRuntime(RayRuntimeOptions(address=address), RunPlan(registry, {"reward": role}, (), folder, 0))
    await runtime.start()
    try:
        completion = Completion(
            "a", np.arange(3), np.zeros(3, np.float32), RAW_BASIS, "stop", SamplingParams(4), (), text="four"
        )
        prompt = Prompt("p", np.arange(2), "?", data_source="mine", ground_truth="4")
        results = await runtime.reward("reward").score([sample_from_completion("a", "a", prompt, completion)])
        return [result.value if result.error is None else result.error for result in results]
    finally:
        await runtime.close()


def run_as_a_job(address: str, folder: Path) -> list[dict[str, float]]:
    """Metrics of a run whose process is started as that of a Ray job is: with RAY_ADDRESS, in the job's directory."""
    folder.mkdir()
    config = write_run(folder)
    command = [sys.executable, "-c", "from chatlearn_cli.main import main; main()", "run", str(config)]
    settings = ["runtime.backend=ray", "train.steps=1", "log.rollouts=0", "weight_sync.backend=checkpoint"]
    done = subprocess.run(
        [*command, *settings, f"output_dir={folder / 'run'}"],
        check=False,
        cwd=folder,
        env={**os.environ, "RAY_ADDRESS": address, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


async def main(address: str, folder: Path) -> dict[str, Any]:
    pairs = PlacedRole("trainer", "trainer", "cuda", 1, 4, together=2, together_why="ulysses 2")
    engine = PlacedRole("engine", "generator", "cuda", 1, 1, devices=2)
    neighbours = (
        PlacedRole("generator", "generator", "cuda", 2, 1, near="trainer", near_why="'broadcast'"),
        PlacedRole("trainer", "trainer", "cuda", 1, 1),
    )
    return {
        "pairs": await nodes_of_placements(address, [pairs, engine]),
        "neighbours": await nodes_of_placements(address, neighbours),
        "scores": await score_elsewhere(address, folder),
        "job": run_as_a_job(address, folder / "job"),
    }


if __name__ == "__main__":
    machines = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1, **SMALL})
    for _ in range(3):
        machines.add_node(num_cpus=4, num_gpus=3, **SMALL)
    machines.wait_for_nodes()
    try:
        ray.init(address=machines.address, log_to_driver=False, configure_logging=False)
        print(json.dumps(asyncio.run(main(machines.address, Path(sys.argv[1])))))
    finally:
        ray.shutdown()
        machines.shutdown()
