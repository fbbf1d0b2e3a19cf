"""What one step costs the driver of the runtime ``ray``, by samples and replicas.

    python benchmarks/driver_scaling.py [--samples 1000 10000 100000] [--replicas 1 64 512]

The driver's own code runs: scheduler, generator fleet, reward group, packing, splitting over as many data-parallel
ranks as there are replicas, and putting answers together. Workers are simulated in the process; messages are pickled
and unpickled as Ray does it, and what a simulated worker itself takes is subtracted, so that CPU time is the driver's
alone. Then the object store of a real Ray against a plain copy of the same bytes. Printed last, one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import pickle
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from machine import machine_facts

from chatlearn_cli.garbage import garbage_collected_seldom
from chatlearn_core.executor.rollout_producer import make_requests
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.flow import trace
from chatlearn_core.metrics import Timers
from chatlearn_core.types import (
    Completion,
    ExampleDraw,
    Prompt,
    RewardResult,
    SamplingParams,
    VersionSpan,
    pack_samples,
    per_sequence,
)
from chatlearn_testing.fakes.fleet_completions import FleetCompletions
from chatlearn_workers.arrays import BatchArrays
from chatlearn_workers.blocks import StoredBlock, Traffic
from chatlearn_workers.completions import CompletionPacker
from chatlearn_workers.generator_fleet import RemoteGeneratorFleet
from chatlearn_workers.generator_worker import ReplicaReport
from chatlearn_workers.outputs import ComputedFacts
from chatlearn_workers.reward_group import RemoteRewardGroup
from chatlearn_workers.split import assign, gather_outputs, take

PROMPT_TOKENS = 64
COMPLETION_TOKENS = 128
GROUP_SIZE = 8
ANSWERS_AT_ONCE = 64
"""Requests that end in one decode step of a replica."""
STORE_BYTES = 200 << 20
REFERENCE_BYTES = 28
no_store: Any = None
"""Nothing is fetched."""
MAX_GROWTH = 1.5
MAX_DRIVER_S = 60.0


class WorkerTime:
    """CPU seconds that simulated workers took: not the driver's."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.message_bytes = 0

    def reply(self, make: Any) -> Any:
        """What the driver gets to hear: made and pickled at the worker's cost, unpickled at the driver's."""
        start = time.process_time()
        message = pickle.dumps(make(), protocol=5)
        self.seconds += time.process_time() - start
        self.message_bytes += len(message)
        return pickle.loads(message)

    def send(self, argument: Any) -> None:
        """What the driver says: pickled at its own cost, arrays aside as Ray does it."""
        buffers: list[pickle.PickleBuffer] = []
        self.message_bytes += len(pickle.dumps(argument, protocol=5, buffer_callback=buffers.append))
        self.message_bytes += sum(buffer.raw().nbytes for buffer in buffers)


class SimulatedWorker:
    """Takes requests and answers them at once: a completion of random length, cut from a ready array."""

    name = label = "simulated"
    timeout_s = 3600.0
    facts = None

    def __init__(self, seed: int, clock: WorkerTime) -> None:
        self._clock = clock
        self._waiting: deque[Any] = deque()
        self._lengths = np.random.default_rng(seed)
        self._tokens = np.arange(COMPLETION_TOKENS)
        self._logprobs = np.zeros(COMPLETION_TOKENS, np.float32)

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        await asyncio.sleep(0)
        self._clock.send(args)
        if method == "submit":
            self._waiting.extend(args[0])
            return None
        assert method == "score"
        return self._clock.reply(lambda: [RewardResult(1.0) for _ in args[0]])

    async def call_for_block(self, method: str, *args: Any, timeout_s: float | None = None) -> tuple[Any, Any]:
        await asyncio.sleep(0)
        assert method == "collect"
        ended = [self._waiting.popleft() for _ in range(min(ANSWERS_AT_ONCE, len(self._waiting)))]

        def report() -> ReplicaReport:
            packer = CompletionPacker()
            return ReplicaReport(
                "serving", 1, tuple((number, packer.add(self._completion(r), r.sampling)) for number, r in ended)
            )

        return self._clock.reply(report), bytes(REFERENCE_BYTES)

    def _completion(self, request: Any) -> Completion:
        length = int(self._lengths.integers(COMPLETION_TOKENS // 4, COMPLETION_TOKENS))
        return Completion(
            request_id=request.id,
            token_ids=self._tokens[:length],
            logprobs=self._logprobs[:length],
            basis=request.sampling.basis,
            finish_reason="stop",
            sampling=request.sampling,
            version_spans=(VersionSpan(0, length, 1),),
            text="the answer is 42",
        )


class SimulatedRuntime:
    def __init__(self, replicas: int, clock: WorkerTime) -> None:
        async def launch(index: int) -> Any:
            return SimulatedWorker(index, clock)

        self.traffic = Traffic()
        self._fleet = RemoteGeneratorFleet("generator", launch, replicas, 3600.0, 0, no_store, self.traffic)
        self._rewards = RemoteRewardGroup("reward", launch, 4, 0, traffic=self.traffic)

    async def start(self) -> None:
        await self._fleet.start()
        await self._rewards.start()

    def generator(self, role: str) -> RemoteGeneratorFleet:
        return self._fleet

    def reward(self, role: str) -> RemoteRewardGroup:
        return self._rewards


def sample_and_score(prompts: Any, m: Any) -> Any:
    """The flow."""
    samples = m.generator.generate(prompts)
    return m.join(samples, m.reward.score(samples))


async def one_step(num_samples: int, replicas: int) -> dict[str, float]:
    """CPU seconds of the driver, by part, and the bytes of its messages."""
    graph = trace(sample_and_score, {"generator": "generator", "reward": "reward"}, name="benchmark")
    worker_time = WorkerTime()
    runtime: Any = SimulatedRuntime(replicas, worker_time)
    await runtime.start()
    prompts = [Prompt(f"p{i}", np.arange(PROMPT_TOKENS), "") for i in range(num_samples // GROUP_SIZE)]
    clock, parts = time.process_time(), {}

    def lap(name: str) -> None:
        nonlocal clock
        now = time.process_time()
        parts[name], clock = now - clock - worker_time.seconds, now
        worker_time.seconds = 0.0

    draws = [ExampleDraw(prompt, 0, prompt.id) for prompt in prompts]
    requests = make_requests(draws, GROUP_SIZE, SamplingParams(max_tokens=COMPLETION_TOKENS), 0)
    samples = await FlowScheduler(graph, runtime, FleetCompletions(runtime)).run(requests, Timers())
    lap("rollout")
    batch = pack_samples(samples)
    lap("pack")
    assignment = assign(batch, replicas)
    lap("balance")
    slices = take(batch, assignment)
    for part in slices:
        worker_time.send(BatchArrays.of(part))
    lap("slice")
    answers = [
        ComputedFacts({}, {"logprobs": ((part.num_tokens,), "<f4")}).outputs(
            StoredBlock(no_store, bytes(REFERENCE_BYTES))
        )
        for part in slices
    ]
    outputs = gather_outputs(batch, assignment, answers, list(range(replicas)), frozenset())
    rows = per_sequence(outputs["logprobs"], batch.lengths, batch.sample_ids, "trainer_logprobs")
    lap("gather")
    assert [len(row) for row in rows] == batch.lengths
    rounded = {name: round(seconds, 4) for name, seconds in parts.items()}
    return rounded | {"message_bytes": worker_time.message_bytes}


def object_store() -> dict[str, float]:
    """GB/s of putting numpy bytes into Ray's store and of taking a view, against a copy in memory."""
    import ray

    values = np.ones(STORE_BYTES, np.uint8)
    target = np.empty_like(values)
    ray.init(
        address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=3 * STORE_BYTES
    )
    try:
        rates: dict[str, float] = {}
        for name, work in (("memcpy", lambda: np.copyto(target, values)), ("put", lambda: ray.put(values))):
            best = math.inf
            for _ in range(4):
                start = time.perf_counter()
                work()
                best = min(best, time.perf_counter() - start)
            rates[f"{name}_gb_s"] = round(STORE_BYTES / best / 1e9, 2)
        reference = ray.put(values)
        start = time.perf_counter()
        ray.get(reference)
        rates["get_view_s"] = round(time.perf_counter() - start, 5)
    finally:
        ray.shutdown()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 64, 512])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for replicas in arguments.replicas:
        for samples in arguments.samples:
            with garbage_collected_seldom():
                parts = asyncio.run(one_step(samples, replicas))
            total = sum(seconds for name, seconds in parts.items() if name != "message_bytes")
            rows.append({"samples": samples, "replicas": replicas, "driver_s": round(total, 3), **parts})
            print(f"{samples:>7} samples, {replicas:>3} replicas: {total:7.2f} s  {parts}", flush=True)
    largest, smallest = max(arguments.samples), min(arguments.samples)
    per_sample = {(row["samples"], row["replicas"]): row["driver_s"] / row["samples"] for row in rows}
    growth = {str(r): round(per_sample[largest, r] / per_sample[smallest, r], 2) for r in arguments.replicas}
    result = {
        "benchmark": "driver_scaling",
        "aim": "cost a sample grows at most by half from 1,000 to 100,000 samples; a step costs seconds",
        "met": max(growth.values()) <= MAX_GROWTH and max(row["driver_s"] for row in rows) < MAX_DRIVER_S,
        "rows": rows,
        "cost_a_sample_largest_over_smallest": growth,
        "object_store": object_store(),
        "machine": machine_facts(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
