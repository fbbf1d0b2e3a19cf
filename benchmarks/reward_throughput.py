"""Samples a second of a rule and of programs in sandboxes, by the number of workers, and what a sandbox costs.

``math`` grades answers; ``code`` runs one program for each sample, with one test of standard input. Both have a sample
waiting for every worker all the time. ``sandbox`` starts empty programs one after the other: ``namespaces`` in a
sandbox, ``none`` with limits alone, ``bare`` without either; the difference is what isolation costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from machine import machine_facts

from chatlearn_core.protocols import Reward, RoleContext
from chatlearn_core.types import RAW_BASIS, Completion, Prompt, Sample, SamplingParams, sample_from_completion
from chatlearn_rewards.code_options import CodeOptions
from chatlearn_rewards.code_reward import CodeReward
from chatlearn_rewards.math_reward import MathReward
from chatlearn_rewards.options import MathOptions
from chatlearn_sandbox.sandbox import Isolation, Limits, Sandbox, run

PROGRAM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
AIM_S = 0.25
"""Seconds that a sandbox may add to a program: less than most programs under test take."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=_powers(len(os.sched_getaffinity(0))))
    parser.add_argument("--samples", type=int, default=200, help="of each reward and number of workers")
    parser.add_argument("--starts", type=int, default=20, help="empty programs, each way")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    wrong_every = 3
    rewards: dict[str, tuple[Callable[[int], Reward], list[Sample]]] = {
        "math": (
            lambda n: MathReward(MathOptions(num_workers=n), RoleContext("reward")),
            [
                _sample(i, rf"\boxed{{\frac{{{i}}}{{7}}}}", f"{i + (i % wrong_every == 0)}/7")
                for i in range(arguments.samples)
            ],
        ),
        "code": (
            lambda n: CodeReward(CodeOptions(num_workers=n), RoleContext("reward")),
            [
                _sample(i, PROGRAM, {"inputs": [f"{i} 1"], "outputs": [str(i + 1 + (i % wrong_every == 0))]})
                for i in range(arguments.samples)
            ],
        ),
    }
    right = sum(i % wrong_every != 0 for i in range(arguments.samples)) / arguments.samples
    throughput = {
        name: {
            str(workers): _throughput(make(workers), samples, right, arguments.repeats) for workers in arguments.workers
        }
        for name, (make, samples) in rewards.items()
    }
    starts = {name: _spread(_start_times(name, arguments.starts)) for name in ("namespaces", "none", "bare")}
    added = starts["namespaces"]["median"] - starts["bare"]["median"]
    result = {
        "benchmark": "reward_throughput",
        "samples_per_s": throughput,
        "start_s": starts,
        "sandbox_adds_s": round(added, 4),
        "aim_s": AIM_S,
        "met": added <= AIM_S,
        "samples": arguments.samples,
        "machine": machine_facts(),
    }
    print(json.dumps(result))


def _throughput(reward: Reward, samples: Sequence[Sample], right: float, repeats: int) -> dict[str, float]:
    """Samples a second, all given at once to workers that are warm."""
    reward.setup()
    try:
        asyncio.run(_score(reward, samples[: min(8, len(samples))]))
        rates = []
        for _ in range(repeats):
            begin = time.perf_counter()
            values = asyncio.run(_score(reward, samples))
            rates.append(len(samples) / (time.perf_counter() - begin))
            assert sum(values) / len(values) == right, "a reward judged wrongly: its speed means nothing"
    finally:
        reward.close()
    return _spread(rates)


async def _score(reward: Reward, samples: Sequence[Sample]) -> list[float]:
    results = await reward.score(samples)
    failed = next((result.error for result in results if result.error), None)
    if failed is not None:
        raise RuntimeError(failed)
    return [float(result.value or 0.0) for result in results]


def _start_times(way: str, count: int) -> list[float]:
    """Seconds from the start of an empty program to its end."""
    isolation: Isolation = "none" if way == "none" else "namespaces"
    sandbox = Sandbox(Limits(), isolation=isolation)
    command = [sandbox.python, "-s", "-S", "-c", "pass"]
    times = []
    for _ in range(count + 1):
        begin = time.perf_counter()
        if way == "bare":
            subprocess.run(command, check=True, env={})
        else:
            with sandbox.start(command) as process:
                [result] = run(process)
            assert result.code == 0, result
        times.append(time.perf_counter() - begin)
    return times[1:]  # the first one reads files that the others find in memory


def _spread(values: Sequence[float]) -> dict[str, float]:
    figures = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    return {name: round(value, 4) for name, value in figures.items()}


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... and ``most``."""
    return sorted({most, *(1 << n for n in range(most.bit_length()) if 1 << n <= most)})


def _sample(index: int, text: str, ground_truth: Any) -> Sample:
    prompt = Prompt(id=f"p{index}", token_ids=np.array([1], dtype=np.int64), text="?", ground_truth=ground_truth)
    completion = Completion(
        request_id=f"p{index}",
        token_ids=np.array([2], dtype=np.int64),
        logprobs=np.zeros(1, dtype=np.float32),
        basis=RAW_BASIS,
        finish_reason="stop",
        sampling=SamplingParams(max_tokens=1),
        version_spans=(),
        text=text,
    )
    return sample_from_completion(f"p{index}", f"g{index}", prompt, completion)


if __name__ == "__main__":
    main()
