"""How long a run needs to go on after a process was killed, on the runtime ``ray``.

    python benchmarks/recovery.py [--rounds 3] [--quick]

A GRPO run with real backends (trainer ``fsdp``, generator ``transformers``) over a cluster on this machine. In step 3 a
process gets SIGKILL: a generator replica, a reward worker, a trainer rank, a whole node, or the driver, which is then
started again by the same command. ``recovery_s`` is the time from the kill until the step that was being made is
complete; ``costs_s`` is that less the median of undisturbed steps. Printed last, one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from grpo_steps import configuration
from machine import machine_facts
from workload import Workload

STEPS = 4
FAULT_STEP = 3
"""The first steps warm up; a checkpoint of every step is written."""
PHASES = {
    "replica": "generating",
    "reward worker": "generating",
    "trainer rank": "updating",
    "node": "updating",
    "driver": "updating",
}
"""When each is killed: as the phase begins. A reward worker is missed when the first completions are there."""
NUM_NODES = 3
"""Two that the roles are spread over, and a spare one."""
NODE = {"num_cpus": 3, "resources": {"slot": 1}, "include_dashboard": False, "object_store_memory": 10**8}
FAST_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}
LOOK_EVERY_S = 0.02


def write_config(directory: Path, address: str, quick: bool) -> Path:
    """A run with two replicas, two reward workers and two ranks, half of each on either of two nodes."""
    size = {"prompts": 4, "completion_tokens": 8} if quick else {"prompts": 16, "completion_tokens": 24}
    workload = Workload("recovery", group_size=4, **size)
    prepared = workload.prepare(directory, STEPS)
    settings = prepared.settings() | {"recompute_old_logprobs": True, "prompts": workload.prompts}
    content = configuration(str(prepared.model), str(prepared.data), str(directory / "run"), settings)
    content["roles"]["trainer"]["ranks"] = 2
    content["roles"]["generator"]["replicas"] = 2
    content["roles"]["reward"]["replicas"] = 2
    content["checkpoint"]["every"] = 1
    content["runtime"] = {
        "backend": "ray",
        "options": {
            "address": address,
            "num_threads": 1,
            "pools": {"nodes": {"slots": 2, "cpus": 3, "resources": {"slot": 1}, "strategy": "node_each"}},
            "roles": {role: {"pool": "nodes"} for role in content["roles"]},
        },
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def killer(fault: str, run: Any, nodes: Mapping[str, Callable[[], None]]) -> Callable[[], None]:
    """What kills the victim, once the run has it."""

    def kill() -> None:
        runtime = run.runtime
        if fault == "node":
            nodes[node_of(runtime.trainer("trainer").workers[1])]()
            return
        worker = {
            "replica": lambda: runtime.generator("generator").replicas[0].worker,
            "reward worker": lambda: runtime.reward("reward").workers[0],
            "trainer rank": lambda: runtime.trainer("trainer").workers[1],
        }[fault]()
        os.kill(worker.facts.pid, signal.SIGKILL)

    return kill


def node_of(worker: Any) -> str:
    """Ray's name of the node that a worker is on."""
    import ray

    return str(ray._private.state.actors(worker.handle.actor._actor_id.hex())["Address"]["NodeID"])


def disturbed(config: Path, output: Path, fault: str | None, nodes: Mapping[str, Callable[[], None]]) -> dict[str, Any]:
    """A run in this process in which ``fault`` happens (None: nothing): seconds of recovery, and of its other steps."""
    from chatlearn_core.config.load import load_config
    from chatlearn_core.executor.assembly import assemble
    from chatlearn_core.executor.progress import RunListener
    from chatlearn_core.executor.run import Run
    from chatlearn_core.plugins.loader import discover_plugins

    class Clock(RunListener):
        killed = recovered = 0.0

        def __init__(self) -> None:
            self.steps: list[float] = []

        def phase(self, step: int, phase: Any) -> None:
            if fault is not None and not self.killed and (step, str(phase)) == (FAULT_STEP, PHASES[fault]):
                self.killed = time.perf_counter()
                kill()

        def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
            if step == FAULT_STEP and self.killed:
                self.recovered = time.perf_counter()
            elif step > 1:
                self.steps.append(metrics["timing_s/step"])

    registry = discover_plugins()
    clock = Clock()
    run = Run(assemble(load_config(config, [f"output_dir={output}"], registry), registry), listener=clock)
    kill = killer(fault, run, nodes) if fault is not None else lambda: None
    asyncio.run(run.train("never"))
    return {"recovery_s": clock.recovered - clock.killed, "steps_s": clock.steps}


def killed_driver(config: Path, output: Path) -> dict[str, Any]:
    """The driver as a process of its own, killed as it updates, and started again."""

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, "--driver", str(config), str(output)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def wait(is_there: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        while not is_there():
            if process.poll() is not None and not is_there():
                raise RuntimeError(f"the driver ended with {process.returncode} before it got there")
            time.sleep(LOOK_EVERY_S)

    first = start()
    wait((output / "updating").exists, first)
    first.kill()
    killed = time.perf_counter()
    first.wait()
    second = start()
    wait(lambda: FAULT_STEP in lines(output), second)
    recovered = time.perf_counter()
    second.wait()
    steps = [line["timing_s/step"] for step, line in lines(output).items() if step not in (1, FAULT_STEP)]
    return {"recovery_s": recovered - killed, "steps_s": steps}


def lines(output: Path) -> dict[int, dict[str, Any]]:
    """The metrics of all steps so far."""
    file = output / "metrics.jsonl"
    whole = [text for text in file.read_text(encoding="utf-8").splitlines(True) if text.endswith("\n")]
    return {line["step"]: line for line in map(json.loads, whole)}


def drive(config: str, output: str) -> None:
    """The driver's program: an ordinary run that leaves a file when it updates in the step of the fault."""
    from chatlearn_core.config.load import load_config
    from chatlearn_core.executor.assembly import assemble
    from chatlearn_core.executor.progress import RunListener
    from chatlearn_core.executor.run import Run
    from chatlearn_core.plugins.loader import discover_plugins

    class Sign(RunListener):
        def phase(self, step: int, phase: Any) -> None:
            if (step, str(phase)) == (FAULT_STEP, PHASES["driver"]):
                (Path(output) / "updating").touch()

    registry = discover_plugins()
    assembly = assemble(load_config(Path(config), [f"output_dir={output}"], registry), registry)
    asyncio.run(Run(assembly, listener=Sign()).train())


def measure(rounds: int, quick: bool, directory: Path) -> dict[str, Any]:
    """All faults on one cluster; there is a spare node, and after the run another."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 10**8}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": FAST_HEALTH_CHECKS})
    machines = {node.node_id: node for node in (cluster.add_node(**NODE) for _ in range(NUM_NODES))}
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)

    def kill_node(node_id: str) -> None:
        cluster.remove_node(machines.pop(node_id), allow_graceful=False)

    config = write_config(directory, cluster.address, quick)
    steps_s: list[float] = []
    recovery_s: dict[str, list[float]] = {fault: [] for fault in PHASES}
    try:
        for number in range(rounds):
            for fault in PHASES:
                output = directory / f"{fault.replace(' ', '_')}_{number}"
                if fault == "driver":
                    done = killed_driver(config, output)
                else:
                    nodes = {node_id: partial(kill_node, node_id) for node_id in machines}
                    done = disturbed(config, output, fault, nodes)
                    while len(machines) < NUM_NODES:
                        node = cluster.add_node(**NODE)
                        machines[node.node_id] = node
                recovery_s[fault].append(done["recovery_s"])
                steps_s += done["steps_s"]
    finally:
        ray.shutdown()
        cluster.shutdown()
    step_s = statistics.median(steps_s)
    return {
        "step_s": round(step_s, 3),
        "faults": {
            fault: {
                "phase": PHASES[fault],
                "recovery_s": round(statistics.median(seconds), 2),
                "recovery_s_range": [round(min(seconds), 2), round(max(seconds), 2)],
                "costs_s": round(statistics.median(seconds) - step_s, 2),
            }
            for fault, seconds in recovery_s.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a step of next to nothing, to see that it works")
    parser.add_argument("--driver", nargs=2, metavar=("CONFIG", "OUTPUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"})
    if arguments.driver:
        drive(*arguments.driver)
        return
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(arguments.rounds, arguments.quick, Path(folder))
    result = {
        "benchmark": "recovery",
        "rounds": arguments.rounds,
        **measured,
        "met": all(fault["recovery_s"] > 0 for fault in measured["faults"].values()),
        "machine": machine_facts(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
