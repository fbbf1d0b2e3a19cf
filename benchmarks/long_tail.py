"""Long-tailed completions: what a step waits for, without and with the rollout manager and partial rollouts.

Aim: the rollout manager lowers the share of time that replicas are idle, and each kind of partial rollout raises the
prompts trained a second. First on simulated replicas whose costs are stated (``costs``), on their own clock: there the
time of a step does not depend on this machine. Then on the real generator `transformers` and trainer `fsdp`, with a
model whose completions end by chance. Prints one JSON line last.

    python benchmarks/long_tail.py [--steps 12] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from grpo_steps import configuration
from machine import installed_version, machine_facts
from simulated_fleet import Costs, SimulatedFleet, run_simulated
from workload import Workload

from chatlearn_core.config.models import RolloutConfig
from chatlearn_core.executor.rollout_producer import make_requests
from chatlearn_core.executor.rollouts.chunked import ChunkedRollouts
from chatlearn_core.executor.rollouts.manager import RolloutManager
from chatlearn_core.executor.rollouts.partial import PartialRollouts
from chatlearn_core.executor.rollouts.paused import PausedRollouts
from chatlearn_core.executor.rollouts.pending import Group
from chatlearn_core.types import ExampleDraw, Prompt, SamplingParams
from chatlearn_core.types.keyed_seed import keyed_seed

SEED = 11


@dataclass(frozen=True, slots=True)
class Tail:
    """The simulated work: completions of log-normal length."""

    replicas: int = 4
    slots: int = 64
    """Sequences that a replica decodes together."""
    prompts: int = 32
    group_size: int = 8
    prompt_tokens: int = 200
    median_tokens: int = 300
    sigma: float = 1.0
    max_tokens: int = 4096

    def length_of(self, sample_id: str) -> int:
        """Tokens of a completion: the same in every setting."""
        draw = np.random.Generator(np.random.Philox(keyed_seed(SEED, "length", sample_id.replace("@", "/"))))
        return int(np.clip(self.median_tokens * np.exp(self.sigma * draw.standard_normal()), 1, self.max_tokens))


TAILS = {
    "long tail": Tail(slots=24, median_tokens=200, max_tokens=2048),
    "even": Tail(slots=16, median_tokens=100, sigma=0.4, max_tokens=1024),
}
"""In the first the longest completion is ten times the median and a step waits for it; in the second it waits for the
replica with the most work."""
QUICK = {name: replace(tail, prompts=4, group_size=2, median_tokens=20, max_tokens=200) for name, tail in TAILS.items()}
SETTINGS: dict[str, dict[str, Any]] = {
    "no manager": {},
    "manager": {},
    "manager, bounded": {"max_concurrent": 1.0},
    "manager, bounded, stealing": {"max_concurrent": 1.0, "work_stealing": True},
    "resume": {"partial": "resume", "round_tokens": 2.0, "max_rounds": 8, "in_flight": 2.0},
    "keep": {"partial": "keep", "max_rounds": 8, "in_flight": 2.0},
}
"""``max_concurrent`` in slots, ``round_tokens`` in median lengths, ``in_flight`` in prompts a step."""


async def simulate(tail: Tail, costs: Costs, name: str, num_steps: int) -> dict[str, float]:
    """Steps of one setting, after as many to get into its stride as a completion may last."""
    setting = SETTINGS[name]
    fleet = SimulatedFleet(tail.replicas, costs, tail.slots, tail.length_of)
    config = RolloutConfig(
        max_concurrent=int(setting["max_concurrent"] * tail.slots) if "max_concurrent" in setting else None,
        work_stealing=setting.get("work_stealing", False),
    )
    clock = asyncio.get_running_loop().time
    manager = RolloutManager(lambda: fleet, config, clock)
    generate = fleet.generate if name == "no manager" else manager.generate
    in_flight = int(setting.get("in_flight", 1.0) * tail.prompts)
    partial: PartialRollouts
    if setting.get("partial") == "keep":
        partial = PausedRollouts(
            generate,
            lambda: fleet,
            prompts_per_step=tail.prompts,
            max_rounds=setting["max_rounds"],
            in_flight_prompts=in_flight,
        )
    else:  # one round without a bound is a step that waits for all
        partial = ChunkedRollouts(
            generate,
            round_tokens=int(setting.get("round_tokens", 0.0) * tail.median_tokens) or tail.max_tokens,
            max_rounds=setting.get("max_rounds", 1),
            in_flight_prompts=in_flight,
        )
    sampling = SamplingParams(tail.max_tokens)
    pending: tuple[Group, ...] = ()
    drawn, seconds, prompts, tokens, stale, idle = 0, [], 0, 0, 0, []
    warm_up = setting.get("max_rounds", 1)
    for step in range(1, warm_up + num_steps + 1):
        start = clock()
        manager.begin()
        fleet.measure()
        wanted = partial.num_prompts(pending)
        # Ids as data has them: crc32 spreads consecutive numbers evenly, and nothing else.
        ids = [f"{keyed_seed(SEED, 'id', drawn + i):x}" for i in range(wanted)]
        new = [ExampleDraw(Prompt(name, np.ones(tail.prompt_tokens, np.int64), ""), step, name) for name in ids]
        drawn += wanted
        rollout_step = partial.begin(pending, make_requests(new, tail.group_size, sampling, SEED))
        playing = asyncio.create_task(partial.play(rollout_step))
        answers = await asyncio.gather(
            *(rollout_step.completion("generator", request) for request in rollout_step.requests)
        )
        await playing
        idle_shares = fleet.occupancy.idle_shares()
        trained = [answer for answer in answers if answer is not None]
        pending, _ = await partial.finish(rollout_step)
        trained_tokens = sum(len(answer.token_ids) + tail.prompt_tokens for answer in trained)
        await asyncio.sleep(costs.train_s * trained_tokens + costs.sync_s)
        fleet.serve(step)
        await partial.weights_changed()
        if step > warm_up:
            seconds.append(clock() - start)
            idle += idle_shares
            prompts += len(trained) // tail.group_size
            tokens += sum(len(answer.token_ids) for answer in trained)
            stale += sum((step - 1 - s.version) * (s.stop - s.start) for a in trained for s in a.version_spans)
    await partial.close()
    await fleet.close()
    return {
        "step_s": round(statistics.median(seconds), 3),
        "prompts_a_step": round(prompts / num_steps, 2),
        "prompts_a_s": round(prompts / sum(seconds), 4),
        "tokens_a_s": round(tokens / sum(seconds), 1),
        "replica_idle": round(statistics.mean(idle), 4),
        "staleness_mean": round(stale / tokens, 3),
    }


def real(directory: Path, name: str, num_steps: int, quick: bool) -> dict[str, float]:
    """GRPO steps with two replicas of the real generator in this process."""
    from chatlearn_core.config.load import load_config
    from chatlearn_core.executor.assembly import assemble
    from chatlearn_core.executor.progress import RunListener
    from chatlearn_core.executor.run import Run
    from chatlearn_core.plugins.loader import discover_plugins

    lines: list[Mapping[str, float]] = []

    class Recorder(RunListener):
        def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
            lines.append(metrics)

    prompts, group_size, longest = (4, 2, 32) if quick else (32, 4, 384)
    warm_up = 1 if name == "manager" else 3
    workload = Workload(name, hidden=32 if quick else 128, layers=2, prompts=2 * prompts, group_size=group_size)
    folder = directory / name
    folder.mkdir()
    made = workload.prepare(folder, num_steps + warm_up + 1)
    settings = made.settings() | {"recompute_old_logprobs": True, "samples": 256, "completion_tokens": longest}
    content = configuration(str(made.model), str(made.data), str(folder / "run"), settings)
    content["algorithm"]["options"]["importance_correction"] = "truncate"
    content["roles"]["generator"]["replicas"] = 2
    content["sampling"]["stop"] = ["z", "7"]  # in some tokens: completions end by chance
    content["train"] = {"steps": num_steps + warm_up, "prompts_per_step": prompts}
    if name == "resume":
        rounds = {"partial": "resume", "round_tokens": longest // 8, "max_rounds": 8, "in_flight_prompts": 2 * prompts}
        content["rollout"] = rounds
    elif name == "keep":
        content["rollout"] = {"partial": "keep"}
    registry = discover_plugins()
    assembly = assemble(load_config(yaml.safe_dump(content), [], registry), registry)
    asyncio.run(Run(assembly, listener=Recorder()).train("never"))
    steps = lines[warm_up:]
    seconds = [line["timing_s/step"] for line in steps]
    trained = sum(line["samples/total"] for line in steps) / group_size
    return {
        "step_s": round(statistics.median(seconds), 3),
        "generate_s": round(statistics.median(line["timing_s/generate"] for line in steps), 3),
        "prompts_a_step": round(trained / len(steps), 2),
        "prompts_a_s": round(trained / sum(seconds), 4),
        "tokens_a_s": round(
            sum(line["response_length/mean"] * line["samples/total"] for line in steps) / sum(seconds), 1
        ),
        "replica_idle": round(statistics.mean(line["perf/replica_idle"] for line in steps), 4),
        "staleness_mean": round(statistics.mean(line["rollout/staleness_mean"] for line in steps), 3),
        "longest_over_mean": round(
            statistics.median(line["response_length/max"] / line["response_length/mean"] for line in steps), 2
        ),
    }


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=12, help="simulated steps measured; a third of them are made for real"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--quick", action="store_true", help="next to nothing: checks that this program works")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    num_steps = 3 if arguments.quick else arguments.steps
    tails, costs = QUICK if arguments.quick else TAILS, Costs()
    simulated = {
        title: {name: run_simulated(simulate(tail, costs, name, num_steps)) for name in SETTINGS}
        for title, tail in tails.items()
    }
    with tempfile.TemporaryDirectory() as directory:
        num_real = max(1, num_steps // 3)
        measured = {
            name: real(Path(directory), name, num_real, arguments.quick) for name in ("manager", "resume", "keep")
        }
    for title, results in (simulated | {"real": measured}).items():
        for name, result in results.items():
            print(f"{title:<10}{name:<28}" + "  ".join(f"{key} {value}" for key, value in result.items()))
    whole = simulated["long tail"]["manager"]["prompts_a_s"]
    gains = {name: round(simulated["long tail"][name]["prompts_a_s"] / whole, 3) for name in ("resume", "keep")}
    idle = {name: simulated["even"][name]["replica_idle"] for name in SETTINGS if "partial" not in SETTINGS[name]}
    print(
        json.dumps(
            {
                "benchmark": "long_tail",
                "prompts_a_s_over_whole_steps": gains,
                "replica_idle": idle,
                "aim": "replicas idle less with the manager, more prompts a second with partial rollouts",
                "met": min(gains.values()) > 1.0 and idle["manager"] < idle["no manager"],
                "simulated": simulated,
                "real": measured,
                "tails": {title: asdict(tail) for title, tail in tails.items()},
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
