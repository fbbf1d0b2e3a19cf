"""Executor time a turn over engine time, for conversations of several turns.

64 conversations at a time in the environment `correction`, whose check finds every answer wrong, so that each takes all
of its turns; the generator is `transformers` on this CPU. ``over_engine``: wall time of the rollouts over the time in
which the generator had an open request. The difference is what the executor, the environment and the chat template
take between the turns, when the engine has nothing to do. ``over_compute``: the same over the generator's decoding
steps alone, which also counts what the generator adds to them. Aim: ``over_engine`` at most 1.05 with 64
conversations. Prints one JSON line last.

With ``--slow-tool-share`` the environment's tool takes ``--slow-tool-s`` seconds after that share of the turns, and two
asynchronous runs are compared instead: ``rollout.options.turns`` ``together``, where every rollout of a step waits for
the slowest tool before its next turn, and ``free``, where none does.

    python benchmarks/episode_overhead.py [--conversations 8 64] [--turns 4] [--steps 5] [--quick]
    python benchmarks/episode_overhead.py --conversations 16 --slow-tool-share 0.1 --slow-tool-s 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from machine import installed_version, machine_facts

from chatlearn_data.arithmetic import problems, prompt_records, solution
from chatlearn_data.output import write_records
from chatlearn_hf.tiny import build_tiny_model, build_tiny_tokenizer

AIM, AIM_CONVERSATIONS = 1.05, 64
GROUP_SIZE = 8
WARM_UP_STEPS = 1
SLOW_TOOL = "EPISODE_OVERHEAD_SLOW_TOOL"
"""Environment variable with the share of the turns whose tool is slow, and its seconds: the check takes no options."""


def wrong(text: str, ground_truth: Any) -> bool:
    """The check of the environment: every answer is wrong, and some take long to check."""
    share, seconds = map(float, os.environ.get(SLOW_TOOL, "0 0").split())
    if zlib.crc32(text.encode()) < share * 2**32:
        time.sleep(seconds)
    return False


@dataclass
class EngineTimes:
    """What the generator did since ``take`` was last called."""

    open: int = 0
    """Open requests."""
    since: float = 0.0
    open_s: float = 0.0
    compute_s: float = 0.0
    num_requests: int = 0

    def take(self) -> dict[str, float]:
        """The times so far, which begin again at zero."""
        found = {"engine_s": self.open_s, "compute_s": self.compute_s, "requests": self.num_requests}
        self.open_s, self.compute_s, self.num_requests = 0.0, 0.0, 0
        return found


@contextmanager
def measured_engine() -> Iterator[EngineTimes]:
    """Times of the generator's requests and decoding steps."""
    from chatlearn_transformers.generator import TransformersGenerator

    times = EngineTimes()
    generate, step = TransformersGenerator.generate, TransformersGenerator._step

    async def timed_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        times.num_requests += 1
        if times.open == 0:
            times.since = time.perf_counter()
        times.open += 1
        try:
            return await generate(self, *args, **kwargs)
        finally:
            times.open -= 1
            if times.open == 0:
                times.open_s += time.perf_counter() - times.since

    def timed_step(self: Any) -> Any:
        start = time.perf_counter()
        try:
            return step(self)
        finally:
            times.compute_s += time.perf_counter() - start

    TransformersGenerator.generate, TransformersGenerator._step = timed_generate, timed_step  # type: ignore[method-assign]  # timed
    try:
        yield times
    finally:
        TransformersGenerator.generate, TransformersGenerator._step = generate, step  # type: ignore[method-assign]  # as before


def configuration(
    folder: Path, conversations: int, arguments: argparse.Namespace, turns: str | None = None
) -> dict[str, Any]:
    """A run that makes ``conversations`` rollouts at a time and trains on them; with ``turns`` it is asynchronous."""
    rollout = {} if turns is None else {"mode": "async", "max_staleness": 1, "options": {"turns": turns}}
    correction = {} if turns is None else {"importance_correction": "truncate"}
    return {
        "rollout": rollout,
        "name": "benchmark",
        "output_dir": str(folder / f"run-{conversations}-{turns}"),
        "model": {"path": str(folder / "model")},
        "data": {"train": [{"path": str(folder / "prompts.jsonl")}]},
        "algorithm": {
            "name": "grpo",
            "options": {"group_size": GROUP_SIZE, "roles": {"environment": "retry", "reward": None}, **correction},
        },
        "roles": {
            "trainer": {"kind": "trainer", "backend": "fsdp", "options": {"learning_rate": 1e-9}},
            "generator": {
                "kind": "generator",
                "backend": "transformers",
                "options": {"max_num_sequences": conversations},
            },
            "retry": {
                "kind": "environment",
                "backend": "correction",
                "uses": {"policy": "generator"},
                "options": {"check": "episode_overhead:wrong", "max_attempts": arguments.turns},
            },
        },
        "sampling": {"max_tokens": arguments.tokens},
        "train": {"steps": WARM_UP_STEPS + arguments.steps, "prompts_per_step": conversations // GROUP_SIZE},
        "runtime": {"options": {"num_threads": arguments.threads}},
        "checkpoint": {"export": False, "every": 0},
        "log": {"rollouts": 0, "progress": False},
    }


def steps_of(configured: Mapping[str, Any]) -> list[dict[str, float]]:
    """The steps of a run after the warm-up: what the engine did, and the run's metrics."""
    from chatlearn_core.config.load import load_config
    from chatlearn_core.executor.assembly import assemble
    from chatlearn_core.executor.progress import RunListener
    from chatlearn_core.executor.run import Run
    from chatlearn_core.plugins.loader import discover_plugins

    steps: list[dict[str, float]] = []
    with measured_engine() as times:

        class Recorder(RunListener):
            def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
                steps.append({**metrics, **times.take(), "rollouts_s": metrics["timing_s/generate"]})

        registry = discover_plugins()
        run = Run(assemble(load_config(yaml.safe_dump(dict(configured)), [], registry), registry), listener=Recorder())
        asyncio.run(run.train("never"))
    return steps[WARM_UP_STEPS:]


def slow_tools(folder: Path, conversations: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Per value of ``turns``: means over steps of the seconds of a step and of the generator's idle fraction.

    Two steps are in flight, so that a long wait is followed by a short one: no median.
    """
    os.environ[SLOW_TOOL] = f"{arguments.slow_tool_share} {arguments.slow_tool_s}"
    results: dict[str, Any] = {}
    for turns in ("together", "free"):
        steps = steps_of(configuration(folder, conversations, arguments, turns))
        results[turns] = {
            "step_s": round(statistics.mean(step["timing_s/step"] for step in steps), 3),
            "generator_idle": round(statistics.mean(step["perf/generator_idle"] for step in steps), 4),
        }
    results["speedup"] = round(results["together"]["step_s"] / results["free"]["step_s"], 3)
    return results


def measure(folder: Path, conversations: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians over steps, per turn of a conversation in milliseconds, and the ratios with their range."""
    measured = steps_of(configuration(folder, conversations, arguments))
    assert all(step["requests"] == conversations * arguments.turns for step in measured), "every turn is taken"
    ratios = [step["rollouts_s"] / step["engine_s"] for step in measured]
    median = {
        name: statistics.median(step[name] for step in measured) for name in ("rollouts_s", "engine_s", "compute_s")
    }
    turns = conversations * arguments.turns
    return {
        "over_engine": round(statistics.median(ratios), 4),
        "over_engine_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "over_compute": round(statistics.median(step["rollouts_s"] / step["compute_s"] for step in measured), 4),
        **{name: round(value, 5) for name, value in median.items()},
        "executor_ms_a_turn": round(1000 * (median["rollouts_s"] - median["engine_s"]) / turns, 4),
        "engine_ms_a_turn": round(1000 * median["engine_s"] / turns, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, nargs="+", default=[8, 64], help="multiples of 8")
    parser.add_argument("--turns", type=int, default=4, help="turns of a conversation")
    parser.add_argument("--tokens", type=int, default=32, help="longest turn")
    parser.add_argument("--steps", type=int, default=5, help="steps measured after the warm-up")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--slow-tool-share", type=float, default=0.0, help="share of the turns whose tool is slow")
    parser.add_argument("--slow-tool-s", type=float, default=2.0, help="what a slow tool takes")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two steps: checks that this program works")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.conversations, arguments.turns, arguments.tokens, arguments.steps = [8], 2, 4, 2
        arguments.hidden, arguments.slow_tool_s = 32, 0.2
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        most = max(arguments.conversations) // GROUP_SIZE * (WARM_UP_STEPS + arguments.steps)
        rows = list(prompt_records(problems(), "train", most, 7))
        corpus = [*(row["prompt"][0]["content"] for row in rows), *map(solution, problems())]
        build_tiny_model(
            folder / "model",
            hidden=arguments.hidden,
            layers=4,
            intermediate=3 * arguments.hidden,
            tokenizer=build_tiny_tokenizer(512, corpus),
            initializer_range=0.02,
        )
        write_records(folder / "prompts.jsonl", rows)
        results = {}
        measured = slow_tools if arguments.slow_tool_share else measure
        for number in arguments.conversations:
            result = results[str(number)] = measured(folder, number, arguments)
            facts = "  ".join(f"{name} {value}" for name, value in result.items())
            print(f"{number:>4} conversations  {facts}", flush=True)
    judged = results.get(str(AIM_CONVERSATIONS), results[str(arguments.conversations[-1])])
    if arguments.slow_tool_share:
        verdict = {"slow_tool_share": arguments.slow_tool_share, "slow_tool_s": arguments.slow_tool_s}
    else:
        verdict = {"over_engine": judged["over_engine"], "aim": AIM, "met": judged["over_engine"] <= AIM}
    print(
        json.dumps(
            {
                "benchmark": "episode_overhead",
                **verdict,
                "conversations": results,
                "turns": arguments.turns,
                "tokens": arguments.tokens,
                "hidden": arguments.hidden,
                "steps": arguments.steps,
                "threads": arguments.threads,
                "quick": arguments.quick,
                "transformers": installed_version("transformers"),
                "machine": machine_facts(),
            }
        )
    )


if __name__ == "__main__":
    main()
