"""Slots with several GPUs on a real Ray, with imagined GPUs: what each worker sees, and keeps when it is rebuilt."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from chatlearn_core.exceptions import BackendError, TrainerLostError
from chatlearn_core.types import GenerateRequest, SamplingParams
from chatlearn_ray.actor import ActorHost
from chatlearn_ray.gpus import NodeGpus
from chatlearn_ray.options import RayRuntimeOptions
from chatlearn_ray.runtime import RayRuntime

from .conftest import SMALL_NODE

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("ray_session", "leaves_nothing")]
POOL: dict[str, Any] = {
    "pools": {"node": {"slots": 1, "gpus": 4, "cpus": 8}},
    "roles": {"trainer": {"pool": "node"}, "generator": {"pool": "node"}},
}


class GpuNode:
    """A node of the cluster with four GPUs, which other jobs' nodes before it have numbered."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.node: Any = None

    def start(self, first: int) -> None:
        visible = ",".join(str(first + i) for i in range(4))
        self.node = self.cluster.add_node(
            num_cpus=8, num_gpus=4, env_vars={"CUDA_VISIBLE_DEVICES": visible}, **SMALL_NODE
        )

    def kill(self) -> None:
        self.cluster.remove_node(self.node, allow_graceful=False)


@pytest.fixture
def gpu_node(cluster: Any) -> Iterator[GpuNode]:
    node = GpuNode(cluster)
    node.start(2)
    yield node
    node.kill()


async def visible_to_ranks(runtime: RayRuntime, folder: Path) -> list[str]:
    await runtime.trainer("trainer").export_model(folder)
    return [file.read_text() for file in sorted(folder.iterdir())]


async def visible_to_replicas(runtime: RayRuntime) -> set[str]:
    requests = [GenerateRequest(f"r{i}", np.arange(3), SamplingParams(max_tokens=4), str(i)) for i in range(8)]
    answers = await asyncio.gather(*(runtime.generator("generator").generate(request) for request in requests))
    return {answer.text for answer in runtime.data.get_completions(answers, {"text"})}


@pytest.mark.thorough
async def test_ranks_and_an_engine_on_two_gpus_each_share_a_slot_through_every_loss(
    roles: Any, tmp_path: Path, gpu_node: GpuNode
) -> None:
    """``auto`` is a GPU in a slot that has some; torch sees none here, so the workers compute on the host anyway."""
    plan = roles.plan(
        replace(roles.role("trainer", "trainer", "counting", ranks=4), device="auto"),
        replace(
            roles.role("generator", "generator", "echo", replicas=2, ranks=2, tells="CUDA_VISIBLE_DEVICES"),
            device="auto",
        ),
    )
    runtime = RayRuntime(RayRuntimeOptions.model_validate({**POOL, "max_generator_restarts": 3}), plan)
    order: list[str] = []

    async def is_up(role: str) -> None:
        order.append(role)

    await runtime.start(is_up)
    try:
        assert order == ["trainer", "generator"], "who shares devices starts one after the other"
        assert await visible_to_ranks(runtime, tmp_path / "first") == ["2", "3", "4", "5"]
        assert await visible_to_replicas(runtime) == {"2,3", "4,5"}
        devices = runtime.devices()
        assert devices["trainer"] == devices["generator"]
        assert len(devices["trainer"]) == 4
        assert all(device.is_gpu for device in devices["trainer"])
        assert ray.available_resources().get("GPU", 0.0) == 0.0, "no other worker gets a GPU of the slot"
        [place] = [line for line in runtime.describe()["generator"]["places"] if line.startswith("replica 1")]
        assert "slot 0: 2 CPU, its GPUs 2 and 3 -> process " in place

        os.kill(runtime.generator("generator").replicas[0].worker.facts.pid, signal.SIGKILL)
        assert await visible_to_replicas(runtime) == {"2,3", "4,5"}

        gpu_node.kill()
        gpu_node.start(8)
        assert await visible_to_replicas(runtime) == {"8,9", "10,11"}
        with pytest.raises(TrainerLostError) as lost:
            await visible_to_ranks(runtime, tmp_path / "lost")
        await runtime.recover(lost.value)
        assert await visible_to_ranks(runtime, tmp_path / "second") == ["8", "9", "10", "11"]
    finally:
        await runtime.close()


async def test_a_slot_without_a_node_is_a_clear_error(roles: Any, gpu_node: GpuNode) -> None:
    role = replace(roles.role("trainer", "trainer", "counting", ranks=2), device="auto")
    options = {"pools": POOL["pools"], "roles": {"trainer": {"pool": "node"}}}
    runtime = RayRuntime(RayRuntimeOptions.model_validate(options), roles.plan(role))
    await runtime.start()
    try:
        gpu_node.kill()
        object.__setattr__(runtime.options, "start_timeout_s", 1.0)
        with pytest.raises(
            BackendError, match=r"pool 'node', slot 0 \(role 'trainer'\) got no node with 4 GPUs within 1"
        ):
            await runtime.cluster.gpus_of(runtime._placement_plan.of("trainer")[1])
    finally:
        await runtime.close()
        gpu_node.start(2)


async def test_a_worker_that_starts_on_another_node_than_its_gpus_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", dict(os.environ))
    host = ActorHost({}, [], str(Path.cwd()), None, NodeGpus("elsewhere", ("3",)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    answer = await host.start(None)
    assert "its slot moved to another node, with other GPUs, while it started" in answer.message
