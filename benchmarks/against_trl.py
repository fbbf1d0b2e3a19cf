"""The same work here and in TRL: samples a second with GRPO, tokens a second with SFT, and peak memory.

Aim: twice TRL's rate. Both train the same Qwen3 on the same prompts with GRPO: equal group size, every completion
exactly as long as the others, one epoch, one optimizer step over a step's samples, no KL, no second pass for old
logprobs, float32, the same threads, no logging, evaluation or saving. With SFT (``--workload sft``) both learn the same
demonstrations, 49 to 356 tokens long, in packed rows; TRL packs them before the first step, by best fit. Each run has
a process of its own; rounds take turns, so that a busy machine disturbs all alike, and CPU time is reported beside wall
time. TRL's fastest setting counts.

    python benchmarks/against_trl.py [--workload small|long|large|sft] [--rounds 3] [--trl-python PATH] [--quick]

TRL lives in ``benchmarks/.venv-trl``, which is made on first use. Prints one JSON line last.
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
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import installed_version, machine_facts
from workload import PreparedWorkload, Workload

AIM = 2.0
HERE = Path(__file__).resolve().parent
TRL_ENVIRONMENT = HERE / ".venv-trl"
TRL = "trl==1.16.0"
WARM_UP_STEPS = 1
MIB = 1 << 20

WORKLOADS = {
    "small": Workload("small", prompts=24, fixed_length=True),
    "long": Workload("long", prompts=24, completion_tokens=64, fixed_length=True),
    "large": Workload("large", hidden=512, layers=8, heads=8, prompts=4, fixed_length=True),
    "sft": Workload("sft", prompts=64, method="sft"),
}
"""0.9M parameters and 32 new tokens; 64 new tokens; 25M parameters; demonstrations."""
QUICK = Workload("quick", hidden=32, layers=2, prompts=4, group_size=4, completion_tokens=8, fixed_length=True)
# Passes about as small as TRL's in its leanest setting: they stay in the processor's caches.
OURS = {"chatlearn": {"recompute_old_logprobs": False, "max_tokens_per_micro_batch": 1536}}
THEIRS = {
    "trl": {"accumulation": 1, "continuous_batching": False},
    "trl_accumulation_8": {"accumulation": 8, "continuous_batching": False},
}
"""TRL in one forward pass, and in eight: smaller activations suit a CPU's caches."""
SFT_OURS = {"chatlearn": {"max_tokens_per_micro_batch": 1536}}
SFT_THEIRS = {
    "trl_packed": {"packing": True, "row_tokens": 512, "batch": 3, "accumulation": 8},
    "trl_packed_long": {"packing": True, "row_tokens": 2048, "batch": 1, "accumulation": 6},
    "trl_padded": {"packing": False, "row_tokens": 512, "batch": 8, "accumulation": 8},
}
"""TRL in packed rows with micro-batches as large as ours, in longer rows, and in padded ones; about as many tokens an
optimizer step as ours."""
CONTINUOUS = {"trl_continuous_batching": {"accumulation": 8, "continuous_batching": True}}


def trl_python() -> Path:
    """The interpreter of TRL's own environment, made if it is not there: torch as here, then TRL."""
    python = TRL_ENVIRONMENT / "bin" / "python"
    if python.exists() and version_in(python, "trl"):
        return python
    print(f"installing {TRL} into {TRL_ENVIRONMENT.name} ...", flush=True)
    venv.create(TRL_ENVIRONMENT, with_pip=True, clear=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch_version = str(installed_version("torch")).partition("+")[0]
    # torch first, alone: pip then takes the build that the package index of this machine prefers.
    subprocess.run([*install, f"torch=={torch_version}"], check=True)
    subprocess.run([*install, TRL, f"transformers=={installed_version('transformers')}"], check=True)
    return python


def version_in(python: Path, distribution: str) -> str | None:
    """Version of a distribution in another interpreter's environment."""
    code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    done = subprocess.run([str(python), "-c", code, distribution], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def run_once(
    program: str, python: Path, made: PreparedWorkload, settings: Mapping[str, Any], threads: int
) -> dict[str, Any]:
    """Run a program of this directory in a fresh process and read the JSON line that it prints last."""
    with tempfile.TemporaryDirectory() as run_dir:
        command = [str(python), str(HERE / program), str(made.model), str(made.data), f"{run_dir}/run"]
        own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(threads)}
        start = time.perf_counter()
        done = subprocess.run(
            [*command, json.dumps(dict(settings))],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | own,
        )
        wall_s = time.perf_counter() - start
    if done.returncode != 0:
        raise SystemExit(f"{program} failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for step in result["steps"] if made.workload.method == "grpo" else ():
        if step["response_length/mean"] != made.workload.completion_tokens:
            raise SystemExit(
                f"{program} generated {step['response_length/mean']} tokens a completion: not the same work"
            )
    return result | {"start_up_s": wall_s - sum(step["wall_s"] for step in result["steps"])}


def figures(runs: Sequence[Mapping[str, Any]], workload: Workload) -> dict[str, Any]:
    """Medians over the runs; a run's step time is the median of its steps after the warm-up."""
    steps = [step_s(run) for run in runs]
    unit = "samples_per_s" if workload.method == "grpo" else "tokens_per_s"
    return {
        unit: round(statistics.median(rate(run, workload) for run in runs), 2),
        "step_s": round(statistics.median(steps), 3),
        "step_range_s": [round(min(steps), 3), round(max(steps), 3)],
        "cpu_s_a_unit": round(statistics.median(1 / rate(run, workload, "cpu_s") for run in runs), 6),
        "start_up_s": round(statistics.median(run["start_up_s"] for run in runs), 2),
        "peak_rss_mib": round(statistics.median(run["peak_rss_bytes"] for run in runs) / MIB, 1),
    }


def step_s(run: Mapping[str, Any], clock: str = "wall_s") -> float:
    """Median time of a run's steps after the warm-up: ``wall_s``, or ``cpu_s`` of all threads."""
    return statistics.median(step[clock] for step in run["steps"][WARM_UP_STEPS:])


def rate(run: Mapping[str, Any], workload: Workload, clock: str = "wall_s") -> float:
    """Samples, or tokens of demonstrations, a second of a run's steps after the warm-up: the median."""
    return statistics.median(
        (workload.samples if workload.method == "grpo" else step["perf/tokens"]) / step[clock]
        for step in run["steps"][WARM_UP_STEPS:]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=list(WORKLOADS), default="small")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each setting, in turns")
    parser.add_argument("--steps", type=int, default=2, help="steps measured a run, after the warm-up")
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has TRL, instead of making one")
    parser.add_argument("--continuous-batching", action="store_true", help="also TRL with continuous batching (slow)")
    parser.add_argument(
        "--threads", type=int, default=1, help="torch's threads; more than one suffers on a busy machine"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round: checks that this program works")
    arguments = parser.parse_args()
    workload, rounds, num_steps = WORKLOADS[arguments.workload], arguments.rounds, arguments.steps
    ours: dict[str, dict[str, Any]] = dict(OURS if workload.method == "grpo" else SFT_OURS)
    theirs: dict[str, dict[str, Any]] = dict(THEIRS if workload.method == "grpo" else SFT_THEIRS)
    theirs |= CONTINUOUS if arguments.continuous_batching else {}
    if arguments.quick:
        rounds, num_steps, theirs = 1, 2, dict([next(iter(theirs.items()))])
        workload = QUICK if workload.method == "grpo" else workload
    python = arguments.trl_python or trl_python()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (*ours, *theirs)}
    with tempfile.TemporaryDirectory() as directory:
        made = workload.prepare(Path(directory), WARM_UP_STEPS + num_steps)
        parameters = made.parameters
        for _ in range(rounds):
            for name, own in ours.items():
                runs[name].append(
                    run_once("grpo_steps.py", Path(sys.executable), made, made.settings() | own, arguments.threads)
                )
            for name, own in theirs.items():
                runs[name].append(run_once("trl_steps.py", python, made, made.settings() | own, arguments.threads))
    results = {name: figures(of_name, workload) for name, of_name in runs.items()}
    unit = "samples_per_s" if workload.method == "grpo" else "tokens_per_s"
    best = max(theirs, key=lambda name: float(results[name][unit]))
    ratios = sorted(
        rate(own, workload) / rate(trl, workload) for own, trl in zip(runs["chatlearn"], runs[best], strict=True)
    )
    ratio = statistics.median(ratios)

    for name, row in results.items():
        print(
            f"{name:<24} {row[unit]:>8} {unit.replace('_per_', '/')}, {row['step_s']} s a step {row['step_range_s']}, "
            f"start-up {row['start_up_s']} s, peak {row['peak_rss_mib']} MiB"
        )
    print(
        json.dumps(
            {
                "benchmark": "against_trl",
                f"{unit}_over_trl": round(ratio, 3),
                "range": [round(ratios[0], 3), round(ratios[-1], 3)],
                "aim": AIM,
                "met": ratio >= AIM,
                "cpu_time_over_trl": round(results["chatlearn"]["cpu_s_a_unit"] / results[best]["cpu_s_a_unit"], 3),
                "peak_memory_over_trl": round(results["chatlearn"]["peak_rss_mib"] / results[best]["peak_rss_mib"], 3),
                "best_trl": best,
                "settings": results,
                "workload": made.settings() | {"parameters": parameters},
                "rounds": rounds,
                "threads": arguments.threads,
                "quick": arguments.quick,
                "trl": version_in(python, "trl"),
                "transformers": installed_version("transformers"),
                "trl_transformers": version_in(python, "transformers"),
                "trl_torch": version_in(python, "torch"),
                "machine": machine_facts(),
            }
        )
    )


if __name__ == "__main__":
    main()
