"""Executor time a turn over engine time, for conversations of several turns.

64 conversations at a time in the environment `correction`, whose check finds every answer wrong, so that each takes all
of its turns; the generator is `transformers` on this CPU. ``over_engine``: wall time of the rollouts over the time in
which the generator had an open request. The difference is what the executor, the environment and the chat template
take between the turns, when the engine has nothing to do. ``over_compute``: the same over the generator's decoding
steps alone, which also counts what the generator adds to them. Aim: ``over_engine`` at most 1.05 with 64
conversations. Prints one JSON line last.

    python benchmarks/episode_overhead.py [--conversations 8 64] [--turns 4] [--steps 5] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
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


def wrong(text: str, ground_truth: Any) -> bool:
    """The check of the environment: every answer is wrong."""
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


def configuration(folder: Path, conversations: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """A run that makes ``conversations`` rollouts at a time and trains on them."""
    return {
        "name": "benchmark",
        "output_dir": str(folder / f"run-{conversations}"),
        "model": {"path": str(folder / "model")},
        "data": {"train": [{"path": str(folder / "prompts.jsonl")}]},
        "algorithm": {
            "name": "grpo",
            "options": {"group_size": GROUP_SIZE, "roles": {"environment": "retry", "reward": None}},
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


def measure(folder: Path, conversations: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians over steps, per turn of a conversation in milliseconds, and the ratios with their range."""
    from chatlearn_core.config.load import load_config
    from chatlearn_core.executor.assembly import assemble
    from chatlearn_core.executor.progress import RunListener
    from chatlearn_core.executor.run import Run
    from chatlearn_core.plugins.loader import discover_plugins

    steps: list[dict[str, float]] = []
    with measured_engine() as times:

        class Recorder(RunListener):
            def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
                steps.append({**times.take(), "rollouts_s": metrics["timing_s/generate"]})

        registry = discover_plugins()
        text = yaml.safe_dump(configuration(folder, conversations, arguments))
        run = Run(assemble(load_config(text, [], registry), registry), listener=Recorder())
        asyncio.run(run.train("never"))
    measured = steps[WARM_UP_STEPS:]
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
    parser.add_argument("--quick", action="store_true", help="a tiny model, two steps: checks that this program works")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.conversations, arguments.turns, arguments.tokens, arguments.steps = [8], 2, 4, 2
        arguments.hidden = 32
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
        for number in arguments.conversations:
            result = results[str(number)] = measure(folder, number, arguments)
            facts = "  ".join(f"{name} {value}" for name, value in result.items())
            print(f"{number:>4} conversations  {facts}", flush=True)
    judged = results.get(str(AIM_CONVERSATIONS), results[str(arguments.conversations[-1])])
    print(
        json.dumps(
            {
                "benchmark": "episode_overhead",
                "over_engine": judged["over_engine"],
                "aim": AIM,
                "met": judged["over_engine"] <= AIM,
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
