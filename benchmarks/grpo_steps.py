"""Steps (GRPO or SFT) of a prepared workload through ChatLearn's executor; run as a program, in a process of its own.

    python benchmarks/grpo_steps.py MODEL DATA RUN_DIR '{"steps": 4, ...}'

prints one JSON line: the metrics of every step, ``wall_s`` and ``forward_s`` among them, and the peak memory.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

KIB = 1024


def configuration(model: str, data: str, run_dir: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A run of the embedded default that writes and evaluates as little as it can."""
    is_sft = settings.get("method") == "sft"
    trainer = {
        "kind": "trainer",
        "backend": "fsdp",
        "device": "cpu",
        "options": {
            "learning_rate": settings["learning_rate"],
            "max_tokens_per_micro_batch": settings.get("max_tokens_per_micro_batch", 8192),
        },
    }
    generator = {
        "kind": "generator",
        "backend": "transformers",
        "device": "cpu",
        "options": {"max_num_sequences": settings["samples"]},
    }
    grpo = {
        "group_size": settings["group_size"],
        "recompute_old_logprobs": settings.get("recompute_old_logprobs", False),
    }
    sampler = {"generator": generator, "reward": {"kind": "reward", "backend": "gsm8k"}}
    return {
        "name": "benchmark",
        "output_dir": run_dir,
        "model": {"path": model},
        "data": {
            "train": [{"path": data, "format": "sft" if is_sft else "prompt"}],
            "apply_chat_template": False,
            "shuffle": False,
        },
        "algorithm": {"name": "sft"} if is_sft else {"name": "grpo", "options": grpo},
        "roles": {"trainer": trainer} | ({} if is_sft else sampler),
        "sampling": {"max_tokens": settings["completion_tokens"]},
        "train": {"steps": settings["steps"], "prompts_per_step": settings["prompts"]},
        "checkpoint": {"export": False},
        "log": {"rollouts": 0, "progress": False},
    }


@contextmanager
def measured_forwards() -> Iterator[list[float]]:
    """Seconds of every forward pass of the trainer's model, those without gradient included."""
    from chatlearn_hf import packed_forward

    seconds: list[float] = []
    forward = packed_forward.PackedModel.forward

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        outputs = forward(self, *args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return outputs

    packed_forward.PackedModel.forward = timed
    try:
        yield seconds
    finally:
        packed_forward.PackedModel.forward = forward


def grpo_steps(model: str, data: str, run_dir: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train; returns one dictionary of metrics a step, and the process's peak memory."""
    from chatlearn_core.config.load import load_config
    from chatlearn_core.executor.assembly import assemble
    from chatlearn_core.executor.progress import RunListener
    from chatlearn_core.executor.run import Run
    from chatlearn_core.plugins.loader import discover_plugins

    class Recorder(RunListener):
        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []
            self.clocks: list[tuple[float, float]] = []

        def started(self, run_dir: Path, total_steps: int, first_step: int) -> None:
            self.clocks.append((time.perf_counter(), time.process_time()))

        def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
            self.clocks.append((time.perf_counter(), time.process_time()))
            wall_s, cpu_s = (now - before for before, now in zip(*self.clocks[-2:], strict=True))
            forward_s = sum(forwards)
            forwards.clear()
            self.steps.append({**metrics, "wall_s": wall_s, "cpu_s": cpu_s, "forward_s": forward_s})

    registry = discover_plugins()
    text = yaml.safe_dump(configuration(model, data, run_dir, settings))
    assembly = assemble(load_config(text, [], registry), registry)
    if settings["fixed_length"]:
        assembly = replace(assembly, sampling=replace(assembly.sampling, ignore_eos=True))
    recorder = Recorder()
    with measured_forwards() as forwards:
        asyncio.run(Run(assembly, listener=recorder).train("never"))
    return {
        "steps": recorder.steps,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB,
    }


if __name__ == "__main__":
    print(json.dumps(grpo_steps(*sys.argv[1:4], json.loads(sys.argv[4]))))
