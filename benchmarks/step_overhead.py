"""Wall time of a GRPO step over the time inside generation, forward, backward and optimizer.

Aim: at most 1.05, the median of five steps. Trains a small and a wider model through the executor. Inside are: the
generate call, ``PackedModel.forward`` (for recomputed logprobs and in the update), the trainer's backward and optimizer
phases. Outside are: composing requests, reward, advantages, packing, the loss, weight sync, metrics. The reward runs in
this process while generation goes on and is left in the step, so the ratio is an upper bound. Prints one JSON line
last.

    python benchmarks/step_overhead.py [--steps 5] [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from grpo_steps import grpo_steps
from machine import installed_version, machine_facts
from workload import Workload

AIM = 1.05
WARM_UP_STEPS = 1
WORKLOADS = (Workload("small"), Workload("wide", hidden=512, heads=8, prompts=8))
QUICK = (Workload("quick", hidden=32, layers=2, prompts=4, group_size=4, completion_tokens=8),)
PARTS = ("generate", "reward", "advantages", "compute/trainer", "update", "sync")


def inside_s(step: Mapping[str, float]) -> float:
    """Seconds of a step inside generation, forward, backward and optimizer."""
    return step["timing_s/generate"] + step["forward_s"] + step["timing_s/backward"] + step["timing_s/optimizer"]


def measure(workload: Workload, num_steps: int) -> dict[str, Any]:
    """Train ``num_steps`` steps after a warm-up; the ratio's median and range, and where the time of a step went."""
    with tempfile.TemporaryDirectory() as directory:
        made = workload.prepare(Path(directory), WARM_UP_STEPS + num_steps)
        settings = made.settings() | {"recompute_old_logprobs": True}
        parameters = made.parameters
        done = grpo_steps(str(made.model), str(made.data), f"{directory}/run", settings)
    steps = done["steps"][WARM_UP_STEPS:]
    ratios = [step["timing_s/step"] / inside_s(step) for step in steps]
    return {
        "workload": asdict(workload) | {"parameters": parameters},
        "ratio": round(statistics.median(ratios), 4),
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "median_s": {
            "step": median_s(steps, "timing_s/step"),
            "forward": median_s(steps, "forward_s"),
            "backward": median_s(steps, "timing_s/backward"),
            "optimizer": median_s(steps, "timing_s/optimizer"),
            **{part: median_s(steps, f"timing_s/{part}") for part in PARTS},
            "outside": round(statistics.median(step["timing_s/step"] - inside_s(step) for step in steps), 5),
        },
    }


def median_s(steps: Sequence[Mapping[str, float]], name: str) -> float:
    """Median over the steps, seconds."""
    return round(statistics.median(step[name] for step in steps), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="steps measured after the warm-up")
    parser.add_argument(
        "--threads", type=int, default=1, help="torch's threads; more than one suffers on a busy machine"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, two steps: checks that this program works")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    num_steps = 2 if arguments.quick else arguments.steps
    results = {workload.name: measure(workload, num_steps) for workload in (QUICK if arguments.quick else WORKLOADS)}
    for name, result in results.items():
        low, high = result["ratio_range"]
        parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in result["median_s"].items())
        print(f"{name:<6} {result['workload']['parameters']:,} parameters: {result['ratio']:.4f} ({low} to {high})")
        print(f"       seconds: {parts}")
    print(
        json.dumps(
            {
                "benchmark": "step_overhead",
                "step_over_inside": max(result["ratio"] for result in results.values()),
                "aim": AIM,
                "met": all(result["ratio"] <= AIM for result in results.values()),
                "steps": num_steps,
                "threads": arguments.threads,
                "quick": arguments.quick,
                "workloads": results,
                "transformers": installed_version("transformers"),
                "machine": machine_facts(),
            }
        )
    )


if __name__ == "__main__":
    main()
