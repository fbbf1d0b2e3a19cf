"""The rollout modes `sync`, `one_step_off` and `async` on long-tailed lengths: speed, idle shares and staleness.

The producers, the rollout manager and the flow scheduler are those of a run; replicas and trainer are simulated on a
clock of their own, with stated costs (``costs``), so that the figures do not depend on this machine. Trainer and
replicas have devices of their own in every mode; the trainer grows with the fleet. Aim: with 64 replicas and
completions whose longest are ten times the median, `async` trains on at least twice as many samples a second as `sync`,
and the trainer, which is the slower side, waits at most 2 % of the time. Then whole runs with two CPU replicas of the
generator `transformers` and the trainer `fsdp`, on this machine's clock: no aim, since both sides share its cores.
Prints one JSON line last.

    python benchmarks/async_training.py [--replicas 8 64 512] [--modes sync "async 8"] [--steps 10] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import statistics
import tempfile
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml
from grpo_steps import configuration
from machine import installed_version, machine_facts
from simulated_fleet import completion, context_length, run_simulated
from workload import Workload

from chatlearn_async.interruption import InterruptibleCompletions
from chatlearn_async.producer import AsyncRolloutProducer
from chatlearn_core.config.models import RolloutConfig, TrainConfig
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.run_state import RunState
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.flow import trace
from chatlearn_core.protocols import OnTokens, PlainData
from chatlearn_core.types import Completion, ExampleDraw, GenerateRequest, Prompt, SamplingParams
from chatlearn_core.types.keyed_seed import keyed_seed
from chatlearn_runtime_kit.replica_fleet import replica_index

SEED = 11


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. The defaults are of the order of a 32B model on eight GPUs a replica."""

    step_s: float = 0.02
    """A decoding step, however many sequences run."""
    sequence_s: float = 0.0004
    """Beside it for each running sequence."""
    prefill_s: float = 0.00002
    """A token of context that is computed, also when a sequence resumes."""
    train_s: float = 0.0016
    """A token that is trained on, divided by the number of replicas: the trainer is as large as the fleet."""
    sync_s: float = 2.0
    """A weight sync."""
    load_s: float = 0.5
    """Of it, the time in which a replica loads what was sent. With ``continue`` replicas load in ``num_turns``."""
    num_turns: int = 8


@dataclass(frozen=True, slots=True)
class Work:
    """The samples of a step: completions of log-normal length."""

    prompts_a_replica: int = 4
    group_size: int = 8
    slots: int = 32
    """Sequences that a replica decodes together."""
    prompt_tokens: int = 200
    median_tokens: int = 500
    sigma: float = 1.0
    max_tokens: int = 5000

    def length_of(self, sample_id: str) -> int:
        """Tokens of a completion: the same in every mode."""
        draw = np.random.Generator(np.random.Philox(keyed_seed(SEED, "length", sample_id)))
        return int(np.clip(self.median_tokens * np.exp(self.sigma * draw.standard_normal()), 1, self.max_tokens))


MODES: dict[str, tuple[int, Any]] = {
    "sync": (0, "wait"),
    "one_step_off": (1, "wait"),
    "async 1": (1, "abort"),
    "async 2": (2, "abort"),
    "async 4": (4, "abort"),
    "async 8": (8, "abort"),
    "async 8, pause": (8, "pause"),
    "async 8, continue": (8, "continue"),
}
"""``max_staleness``, and what becomes of unfinished completions at a weight sync."""


@dataclass(eq=False, slots=True)
class Running:
    """A sequence in a replica. Its number of tokens is the replica's count of decoding steps less ``start``."""

    request: GenerateRequest
    future: asyncio.Future[Completion]
    spans: list[list[int]]
    start: int = 0
    stop: int = 0
    """Decoding step after which it has all its tokens."""


class Replica:
    """An engine with continuous batching. Its clock goes from one change of its batch to the next."""

    def __init__(self, costs: Costs, work: Work) -> None:
        self.costs, self.work = costs, work
        self.version = self.steps = 0
        self.running: dict[str, Running] = {}
        self.waiting: deque[Running] = deque()
        self.busy_s = 0.0
        self._ends: list[tuple[int, int, Running]] = []
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._worker: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        prior = request.resume_from
        spans = [] if prior is None else [[s.start, s.stop, s.version] for s in prior.version_spans]
        sequence = Running(request, asyncio.get_running_loop().create_future(), spans)
        self.waiting.append(sequence)
        self._changed.set()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._run())
        return await sequence.future

    async def abort(self, request_ids: Collection[str]) -> None:
        """Answer these requests with the tokens so far."""
        self._changed.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the worker has counted the steps up to now
        chosen = set(request_ids)
        for sequence in [s for s in self.waiting if s.request.id in chosen]:
            self.waiting.remove(sequence)
            self._answer(sequence, "abort")
        for name in chosen & self.running.keys():
            self._answer(self.running.pop(name), "abort")
        self._ends = [end for end in self._ends if end[2].request.id in self.running]
        heapq.heapify(self._ends)

    async def abort_all(self) -> None:
        await self.abort([*self.running, *(sequence.request.id for sequence in self.waiting)])

    def pause(self) -> None:
        self._may_run.clear()
        self._changed.set()

    def resume(self) -> None:
        self._may_run.set()

    def serve(self, version: int) -> None:
        for sequence in self.running.values():
            self._close_span(sequence)
        self.version = version

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while self.running or self.waiting:
            await self._may_run.wait()
            began = clock()
            await self._admit()
            step_s = self.costs.step_s + self.costs.sequence_s * len(self.running)
            self._changed.clear()
            start, left = clock(), self._ends[0][0] - self.steps
            try:
                async with asyncio.timeout(left * step_s):
                    await self._wait_for_change()
                left = min(left, int((clock() - start) / step_s + 1e-6))
            except TimeoutError:
                pass
            self.steps += left
            self.busy_s += clock() - began
            while self._ends and self._ends[0][0] <= self.steps:
                sequence = heapq.heappop(self._ends)[2]
                del self.running[sequence.request.id]
                self._answer(sequence, "stop")
            await asyncio.sleep(0)  # those that were answered may ask for more

    async def _wait_for_change(self) -> None:
        """Wait until the batch changes: a pause, an abort, or a request for which there is a place."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not self._may_run.is_set() or not self.waiting or len(self.running) < self.work.slots:
                return

    async def _admit(self) -> None:
        room = min(self.work.slots - len(self.running), len(self.waiting))
        admitted = [self.waiting.popleft() for _ in range(room)]
        contexts = [context_length(sequence.request) for sequence in admitted]
        if contexts:
            await asyncio.sleep(self.costs.prefill_s * sum(contexts))
        for sequence in admitted:
            done = sequence.spans[-1][1] if sequence.spans else 0
            sequence.start = self.steps - done
            sequence.stop = sequence.start + self.work.length_of(sequence.request.id)
            self.running[sequence.request.id] = sequence
            heapq.heappush(self._ends, (sequence.stop, next(self._numbers), sequence))

    def _close_span(self, sequence: Running) -> None:
        done = sequence.spans[-1][1] if sequence.spans else 0
        if (count := self.steps - sequence.start) > done:
            sequence.spans.append([done, count, self.version])

    def _answer(self, sequence: Running, reason: str) -> None:
        if sequence.request.id not in self.running and reason == "abort" and sequence.stop == 0:
            count = sequence.spans[-1][1] if sequence.spans else 0  # it waited
        else:
            self._close_span(sequence)
            count = sequence.spans[-1][1] if sequence.spans else 0
        found = completion(sequence.request, count, _joined(sequence.spans), True)
        if reason == "abort":
            object.__setattr__(found, "finish_reason", "abort")
        if not sequence.future.done():
            sequence.future.set_result(found)


def _joined(spans: list[list[int]]) -> list[list[int]]:
    """Spans, neighbours of one version as one."""
    joined: list[list[int]] = []
    for start, stop, version in spans:
        if joined and joined[-1][2] == version:
            joined[-1][1] = stop
        else:
            joined.append([start, stop, version])
    return joined


@dataclass(eq=False)
class Fleet:
    """A ``GeneratorFleet`` of simulated replicas."""

    replicas: list[Replica]
    accepting: frozenset[int] = field(init=False)
    name = "generator"

    def __post_init__(self) -> None:
        self.accepting = frozenset(range(len(self.replicas)))

    @property
    def num_replicas(self) -> int:
        return len(self.replicas)

    async def generate(
        self, request: GenerateRequest, replica: int | None = None, on_tokens: OnTokens | None = None
    ) -> Completion:
        index = replica_index(request, self.num_replicas) if replica is None else replica
        if index not in self.accepting:
            index = sorted(self.accepting)[replica_index(request, len(self.accepting))]
        return await self.replicas[index].generate(request)

    async def sync(self, version: int, how: str, costs: Costs) -> None:
        """All replicas change together, or with ``continue`` in turns after the trainer has sent."""
        await asyncio.sleep(costs.sync_s - costs.load_s)
        num_turns = min(costs.num_turns, self.num_replicas) if how == "continue" else 1
        for first in range(num_turns):
            turn = range(first, self.num_replicas, num_turns)
            if how == "continue":
                self.accepting -= set(turn)
                await asyncio.gather(*(self.replicas[index].abort_all() for index in turn))
            await asyncio.sleep(costs.load_s)
            for index in turn:
                self.replicas[index].serve(version)
            self.accepting = frozenset({*self.accepting, *turn})

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        assert request_ids is not None
        await asyncio.gather(*(replica.abort(request_ids) for replica in self.replicas))

    async def pause(self) -> None:
        for replica in self.replicas:
            replica.pause()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def resume(self) -> None:
        for replica in self.replicas:
            replica.resume()


class Draws:
    """Prompts with ids as data has them."""

    def __init__(self, work: Work) -> None:
        self.work, self.count = work, 0

    def next_batch(self, size: int) -> list[ExampleDraw]:
        first, self.count = self.count, self.count + size
        names = [f"{keyed_seed(SEED, 'id', number):x}" for number in range(first, first + size)]
        tokens = np.ones(self.work.prompt_tokens, np.int64)
        return [ExampleDraw(Prompt(name, tokens, ""), 0, name) for name in names]


async def simulate(mode: str, num_replicas: int, work: Work, costs: Costs, num_steps: int) -> dict[str, float]:
    """Steps of one mode, after as many as a completion may last."""
    staleness, how = MODES[mode]
    clock = asyncio.get_running_loop().time
    fleet = Fleet([Replica(costs, work) for _ in range(num_replicas)])
    runtime: Any = SimpleNamespace(generator=lambda role: fleet, data=PlainData(), devices=dict)
    rollouts = Rollouts(runtime, RolloutConfig())
    prompts = work.prompts_a_replica * num_replicas
    warm_up = staleness + 2
    state = RunState({})
    producer = AsyncRolloutProducer(
        FlowScheduler(trace(lambda p, m: m.generator.generate(p), {"generator": "generator"}), runtime, front=rollouts),
        SimpleNamespace(group_size=work.group_size),  # type: ignore[arg-type]  # the part that is used
        Draws(work),  # type: ignore[arg-type]  # the part that is used
        SamplingParams(work.max_tokens),
        SEED,
        source=InterruptibleCompletions(rollouts, ["generator"], how, clock=clock),
        state=state,
        train=TrainConfig(steps=warm_up + num_steps + staleness, prompts_per_step=prompts),
        max_staleness=staleness,
        serving=frozenset({"generator"}),
        clock=clock,
    )
    await producer.updates_done()
    tokens = samples = 0
    waits, stale, dropped, start, busy_s = [], [], [], 0.0, 0.0
    for step in range(1, warm_up + num_steps + 1):
        if step == warm_up + 1:
            start, busy_s = clock(), sum(replica.busy_s for replica in fleet.replicas)
        production = await producer.produce(step, prompts)
        trained = [sample for group in production.groups for sample in group.samples]
        length = sum(len(sample.token_ids) for sample in trained)
        await asyncio.sleep(costs.train_s * length / num_replicas)
        await producer.before_sync()
        await fleet.sync(step, how, costs)
        state.policy_version = step
        await producer.updates_done()
        state.step = step
        if step > warm_up:
            samples += len(trained)
            tokens += length
            waits.append(production.metrics["perf/updater_idle"].value)
            dropped.append(production.metrics["rollout/dropped_stale"].value)
            ages = [(a, production.metrics[f"rollout/staleness/{a}"].value) for a in range(staleness + 1)]
            stale.append(sum(age * share for age, share in ages))
    seconds = clock() - start
    busy_s = sum(replica.busy_s for replica in fleet.replicas) - busy_s
    await producer.close()
    for replica in fleet.replicas:
        await replica.close()
    return {
        "samples_a_s": round(samples / seconds, 3),
        "tokens_a_s": round(tokens / seconds, 1),
        "step_s": round(seconds / num_steps, 2),
        "trainer_idle": round(statistics.mean(waits), 4),
        "replica_idle": round(1.0 - busy_s / seconds / num_replicas, 4),
        "dropped_stale": max(dropped),
        "staleness_mean": round(statistics.mean(stale), 3),
    }


REAL_MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "one_step_off": {"mode": "one_step_off"},
    "async 2": {"mode": "async", "max_staleness": 2},
}
"""Section ``rollout`` of the real runs."""


def real(directory: Path, mode: str, num_steps: int, quick: bool) -> dict[str, float]:
    """GRPO steps with two replicas of the real generator, after as many as a completion may last.

    Completions end by chance, at tokens that keyed random numbers draw; with a learning rate next to nothing, the
    lengths are the same in every mode.
    """
    from chatlearn_core.config.load import load_config
    from chatlearn_core.executor.assembly import assemble
    from chatlearn_core.executor.progress import RunListener
    from chatlearn_core.executor.run import Run
    from chatlearn_core.plugins.loader import discover_plugins

    lines: list[Mapping[str, float]] = []
    lengths: list[int] = []

    class Recorder(RunListener):
        def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
            lines.append(metrics)

    prompts, group_size, longest = (2, 2, 24) if quick else (8, 4, 256)
    warm_up = 3
    workload = Workload(mode, hidden=32 if quick else 96, layers=2, prompts=prompts, group_size=group_size)
    folder = directory / mode.replace(" ", "_")
    folder.mkdir()
    made = workload.prepare(folder, num_steps + warm_up + 3)
    settings = made.settings() | {
        "recompute_old_logprobs": True,
        "samples": 64,
        "completion_tokens": longest,
        "learning_rate": 1e-9,
    }
    content = configuration(str(made.model), str(made.data), str(folder / "run"), settings)
    content["algorithm"]["options"]["importance_correction"] = "truncate"
    content["roles"]["generator"]["replicas"] = 2
    content["sampling"]["stop"] = ["z", "7"]  # in some tokens: completions end by chance
    content["train"] = {"steps": num_steps + warm_up + 2, "prompts_per_step": prompts}  # the last two draw less ahead
    content["rollout"] = REAL_MODES[mode]
    content["log"]["rollouts"] = prompts * group_size
    registry = discover_plugins()
    assembly = assemble(load_config(yaml.safe_dump(content), [], registry), registry)
    asyncio.run(Run(assembly, listener=Recorder()).train("never"))
    steps = lines[warm_up : warm_up + num_steps]
    for step in range(warm_up + 1, warm_up + num_steps + 1):
        rows = (folder / "run" / "rollouts" / f"step_{step:06d}.jsonl").read_text(encoding="utf-8").splitlines()
        lengths += [len(json.loads(row)["token_ids"]) for row in rows]
    seconds = sum(line["timing_s/step"] for line in steps)
    generating = sum(line["timing_s/generate"] for line in steps) / seconds  # of sync: one side waits for the other
    return {
        "samples_a_s": round(sum(line["samples/total"] for line in steps) / seconds, 3),
        "step_s": round(seconds / num_steps, 3),
        "trainer_idle": round(
            statistics.mean(line.get("perf/updater_idle", generating) for line in steps),
            4,
        ),
        "generator_idle": round(
            statistics.mean(line.get("perf/generator_idle", 1.0 - generating) for line in steps), 4
        ),
        "dropped_stale": max(line.get("rollout/dropped_stale", 0.0) for line in steps),
        "staleness_mean": round(statistics.mean(line.get("rollout/staleness_mean", 0.0) for line in steps), 3),
        "tokens_mean": round(statistics.mean(lengths), 2),
        "longest_over_median": round(max(lengths) / statistics.median(lengths), 2),
    }


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="simulated modes")
    parser.add_argument("--only-simulated", action="store_true", help="make no real runs")
    parser.add_argument("--steps", type=int, default=10, help="steps measured")
    parser.add_argument("--quick", action="store_true", help="next to nothing: checks that this program works")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    arguments = parser.parse_args()
    if "sync" not in arguments.modes or not any(mode.startswith("async") for mode in arguments.modes):
        parser.error("--modes needs sync, which the others are compared with, and an async mode")
    torch.set_num_threads(arguments.threads)
    costs = Costs()
    work = Work(prompts_a_replica=2, group_size=2, slots=4, median_tokens=50) if arguments.quick else Work()
    sizes, num_steps = ([2], 2) if arguments.quick else (arguments.replicas, arguments.steps)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for size in sizes:
        found = results[str(size)] = {}
        for mode in arguments.modes:
            result = found[mode] = run_simulated(simulate(mode, size, work, costs, num_steps))
            print(f"{size:>4} {mode:<18}" + "  ".join(f"{key} {value}" for key, value in result.items()), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        modes = () if arguments.only_simulated else REAL_MODES
        measured = {mode: real(Path(directory), mode, num_steps, arguments.quick) for mode in modes}
    for mode, result in measured.items():
        print(f"real {mode:<18}" + "  ".join(f"{key} {value}" for key, value in result.items()), flush=True)
    judged = results.get("64", results[str(sizes[0])])
    gains = {mode: round(one["samples_a_s"] / judged["sync"]["samples_a_s"], 2) for mode, one in judged.items()}
    best = max((mode for mode in judged if mode.startswith("async")), key=lambda mode: gains[mode])
    idle = judged[best]["trainer_idle"]
    dropped = max(one["dropped_stale"] for found in (*results.values(), measured) for one in found.values())
    print(
        json.dumps(
            {
                "benchmark": "async_training",
                "samples_a_s_over_sync": gains,
                "best": best,
                "trainer_idle": idle,
                "dropped_stale": dropped,
                "aim": "at least 2 with 64 replicas; the slower side, the trainer, idle at most 2 %; nothing dropped",
                "met": gains[best] >= 2.0 and idle <= 0.02 and dropped == 0.0,
                "simulated": results,
                "real": measured,
                "work": asdict(work),
                "costs": asdict(costs),
                "steps": num_steps,
                "threads": arguments.threads,
                "quick": arguments.quick,
                "transformers": installed_version("transformers"),
                "machine": machine_facts(),
            }
        )
    )


if __name__ == "__main__":
    main()
