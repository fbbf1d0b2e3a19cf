"""The same GRPO run on the local runtime and on Ray: what the runtime adds to a step.

    python benchmarks/runtimes.py [--steps 6]

Each run is a process of its own with one torch thread a worker; the two take turns, ``--rounds`` times. Printed last,
one JSON line: seconds a step (median and spread over steps after the first, which warms up), difference, start-up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from grpo_steps import configuration
from machine import machine_facts
from workload import PreparedWorkload, Workload

CHATLEARN = (sys.executable, "-c", "from chatlearn_cli.main import main; main()")
PHASES = ("generate", "reward", "update", "sync")


def run(config: Path, runtime: str, output: Path) -> dict[str, Any]:
    """One run; the metrics of its steps but the first, and its wall time."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    subprocess.run(
        [*CHATLEARN, "run", str(config), f"output_dir={output}", f"runtime.backend={runtime}"],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    wall_s = time.perf_counter() - start
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps_s = sum(line["timing_s/step"] for line in lines)
    return {"steps": lines[1:], "outside_steps_s": wall_s - steps_s}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and spread of the step over all runs of one runtime, and the medians of its phases."""
    steps = [line for one in runs for line in one["steps"]]
    seconds = sorted(line["timing_s/step"] for line in steps)
    return {
        "step_s": round(statistics.median(seconds), 4),
        "step_s_spread": [round(seconds[0], 4), round(seconds[-1], 4)],
        "phases_s": {
            name: round(statistics.median(line.get(f"timing_s/{name}", 0.0) for line in steps), 4) for name in PHASES
        },
        "outside_steps_s": round(statistics.median(one["outside_steps_s"] for one in runs), 1),
        "object_store_bytes": int(statistics.median(line.get("perf/object_store_bytes", 0.0) for line in steps)),
    }


def write_config(prepared: PreparedWorkload, directory: Path) -> Path:
    workload = prepared.workload
    settings = {
        "group_size": workload.group_size,
        "recompute_old_logprobs": True,
        "learning_rate": workload.learning_rate,
        "samples": workload.samples,
        "completion_tokens": workload.completion_tokens,
        "steps": prepared.steps,
        "prompts": workload.prompts,
    }
    path = directory / "run.yaml"
    content = configuration(str(prepared.model), str(prepared.data), str(directory / "run"), settings)
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        workload = Workload("runtimes", prompts=arguments.prompts, completion_tokens=24)
        config = write_config(workload.prepare(directory, arguments.steps), directory)
        runs: dict[str, list[dict[str, Any]]] = {"local": [], "ray": []}
        for number in range(arguments.rounds):
            for runtime, done in runs.items():
                done.append(run(config, runtime, directory / f"{runtime}{number}"))
    local, ray = summary(runs["local"]), summary(runs["ray"])
    result = {
        "benchmark": "runtimes",
        "samples_per_step": workload.samples,
        "local": local,
        "ray": ray,
        "ray_adds_s": round(ray["step_s"] - local["step_s"], 4),
        "ray_over_local": round(ray["step_s"] / local["step_s"], 3),
        "machine": machine_facts(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
