"""A run over three nodes on one machine, of which one is killed. A program of its own: Ray is joined once a process.

Prints one JSON line with what happened.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster

from chatlearn_core.exceptions import TrainerLostError
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.protocols import ModelSource
from chatlearn_core.runtime.plan import BackendPlan, RolePlan, RunPlan
from chatlearn_core.types import GenerateRequest, SamplingParams, TrainBatch, cumulative_lengths
from chatlearn_ray.options import RayRuntimeOptions
from chatlearn_ray.runtime import RayRuntime

FAST_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}
SMALL: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 10**8}


def role(registry: Any, name: str, kind: str, backend: str, replicas: int, ranks: int) -> RolePlan:
    record = registry.select(kind, backend)
    plan = BackendPlan(f"roles.{name}", record, registry.load_options(record)())
    return RolePlan(
        name, kind, (plan,), ModelSource("nowhere", "nowhere"), "lm", "cpu", replicas, ranks, True, {}, 60.0
    )


async def train_again(runtime: RayRuntime) -> tuple[float, str]:
    """Sequences that the rebuilt trainer saw, and what was said of the lost rank."""
    from chatlearn_ray_test_backends import CountingLoss

    batch = TrainBatch(
        sample_ids=("a", "b", "c"),
        token_ids=torch.arange(6),
        cu_seqlens=cumulative_lengths([1, 2, 3]),
        loss_mask=torch.ones(6, dtype=torch.bool),
        unit_index=torch.arange(3),
        group_index=torch.arange(3),
    )
    trainer = runtime.trainer("trainer")
    try:
        await trainer.update(batch, CountingLoss(1.0))
    except TrainerLostError as error:
        await runtime.recover(error)
        return (await trainer.update(batch, CountingLoss(1.0)))["sequences"].value, str(error)
    return 0.0, "nothing was lost"


async def main(cluster: Cluster, nodes: list[Any], folder: Path) -> dict[str, Any]:
    registry = discover_plugins()
    roles = [
        role(registry, "generator", "generator", "echo", replicas=2, ranks=1),
        role(registry, "trainer", "trainer", "counting", replicas=1, ranks=2),
    ]
    options = RayRuntimeOptions.model_validate(
        {
            "address": cluster.address,
            "pools": {"apart": {"slots": 2, "cpus": 2, "resources": {"slot": 1}, "strategy": "node_each"}},
            "roles": {"generator": {"pool": "apart"}, "trainer": {"pool": "apart"}},
        }
    )
    plan = RunPlan(registry, {r.name: r for r in roles}, (), folder, 0)
    runtime = RayRuntime(options, plan)
    await runtime.start()
    fleet = runtime.generator("generator")

    def nodes_of(workers: list[Any]) -> list[str]:
        table = ray._private.state.actors()
        return [table[worker.handle.actor._actor_id.hex()]["Address"]["NodeID"] for worker in workers]

    async def ask(count: int) -> list[str]:
        requests = [GenerateRequest(f"r{i}", np.arange(3), SamplingParams(max_tokens=4), str(i)) for i in range(count)]
        return [answer.request_id for answer in await asyncio.gather(*(fleet.generate(r) for r in requests))]

    before = nodes_of([replica.worker for replica in fleet.replicas])
    ranks = nodes_of(runtime.trainer("trainer").workers)
    await ask(8)
    victim = next(node for node in nodes if node.node_id == before[1])
    cluster.remove_node(victim, allow_graceful=False)
    cluster.add_node(num_cpus=2, resources={"slot": 1}, **SMALL)
    answered = await ask(8)
    trained, lost = await train_again(runtime)
    after = nodes_of([replica.worker for replica in fleet.replicas])
    await runtime.close()
    return {
        "spread": len(set(before)) == 2 and set(before) == set(ranks) and before == ranks,
        "answered": answered,
        "trained": trained,
        "lost": lost.partition(" (")[0],
        "restarts": fleet.num_restarts,
        "replica_0_stayed": before[0] == after[0],
        "replica_1_moved": before[1] != after[1],
    }


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    machines = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": FAST_HEALTH_CHECKS, **SMALL}
    )
    workers = [machines.add_node(num_cpus=2, resources={"slot": 1}, **SMALL) for _ in range(2)]
    machines.wait_for_nodes()
    try:
        print(json.dumps(asyncio.run(main(machines, workers, Path(sys.argv[1])))))
    finally:
        ray.shutdown()
        machines.shutdown()
