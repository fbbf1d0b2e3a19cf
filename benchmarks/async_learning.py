"""What staleness costs in learning: held-out accuracy against samples trained on.

GRPO on the arithmetic task, from the warm start that `learning.py` makes: `sync`, and `async` with a maximum staleness
of 1, 4 and 8 policy versions, each with truncated importance sampling of the tokens of older weights (`corrected`) and
with all of its weights held at 1 (`uncorrected`). A run is a directory: finished ones are kept, and a run that was
stopped resumes.

    python benchmarks/async_learning.py                            # one seed
    python benchmarks/async_learning.py --seeds 0 1 2 --steps 40 --processes 4

Aim: corrected runs gain at least half of what `sync` gains, in the mean over seeds. Prints one JSON line last, and
writes it to ``async_learning.json`` in ``--directory``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import learning
from machine import machine_facts

CORRECTED = {"importance_correction": "truncate", "importance_threshold": 2.0}
UNCORRECTED = {"importance_correction": "truncate", "importance_threshold": 1.0, "importance_min": 1.0}
"""Weights between 1 and 1: the tokens of older weights count as the policy's own."""
STALENESS = (1, 4, 8)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sync": ({}, CORRECTED),
    **{
        f"staleness {limit}, {name}": ({"mode": "async", "max_staleness": limit}, options)
        for limit in STALENESS
        for name, options in (("corrected", CORRECTED), ("uncorrected", UNCORRECTED))
    },
}
"""Section ``rollout``, and options of ``grpo`` beside the group size."""


def configuration(variant: str, seed: int, directory: Path, steps: int, every: int, heldout: int) -> dict[str, Any]:
    """The configuration of a run, which evaluates ``heldout`` prompts before and after training and every ``every``
    steps.
    """
    rollout, options = VARIANTS[variant]
    content = learning.configuration("grpo", seed, directory)
    name = f"{variant.replace(', ', '-').replace(' ', '_')}-{seed}"
    content |= {"name": name, "output_dir": str(directory / name), "rollout": rollout}
    content["algorithm"]["options"] |= options
    content["train"]["steps"] = steps
    content["eval"] = {"at_start": True, "at_end": True, "every": every}
    content["data"]["eval"][0]["limit"] = heldout
    return content


def run(content: Mapping[str, Any], directory: Path) -> None:
    """Make a run, unless it is finished."""
    if learning.summary_of(Path(content["output_dir"])) is None:
        learning.chatlearn("run", content, directory / "configs" / f"{content['name']}.yaml")


def result_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """``curve``: pairs of samples trained on and held-out accuracy, and what the run tells of staleness."""
    file = Path(content["output_dir"]) / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    trained, curve = 0, []
    for line in lines:
        trained += line.get("samples/trained", 0)
        if "eval/accuracy" in line:
            curve.append([trained, round(line["eval/accuracy"], 4)])
    steps = [line for line in lines if line["step"] > 0]
    return {
        "curve": curve,
        "staleness_mean": round(statistics.mean(line.get("rollout/staleness_mean", 0.0) for line in steps), 3),
        "staleness_max": max(line.get("rollout/staleness_max", 0) for line in steps),
        "dropped_stale": max(line.get("rollout/dropped_stale", 0.0) for line in steps),
        "stale_kl": round(statistics.mean(line.get("mismatch/stale_kl", 0.0) for line in steps), 5),
    }


def gain(results: Sequence[Mapping[str, Any]]) -> float:
    """Held-out accuracy after training less that before, mean over seeds."""
    return statistics.mean(one["curve"][-1][1] - one["curve"][0][1] for one in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/async_learning"), help="where runs are kept")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--steps", type=int, default=40, help="of 128 samples each")
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--heldout", type=int, default=400, help="held-out prompts")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    arguments = parser.parse_args()
    directory: Path = arguments.directory.resolve()
    learning.warm_start(directory)
    contents = {
        variant: [
            configuration(variant, seed, directory, arguments.steps, arguments.every, arguments.heldout)
            for seed in arguments.seeds
        ]
        for variant in VARIANTS
        if variant in arguments.only
    }
    with ThreadPoolExecutor(arguments.processes) as pool:
        for future in [pool.submit(run, content, directory) for of in contents.values() for content in of]:
            future.result()
    found = {variant: [result_of(content) for content in of] for variant, of in contents.items()}
    gains = {variant: round(gain(results), 4) for variant, results in found.items()}
    for variant, results in found.items():
        curve = "  ".join(f"{samples:.0f}: {accuracy:.3f}" for samples, accuracy in results[0]["curve"])
        print(f"{variant:<26}gain {gains[variant]:+.3f}  seed {arguments.seeds[0]}: {curve}", flush=True)
    corrected = [value for variant, value in gains.items() if variant.endswith(", corrected")]
    record = {
        "benchmark": "async_learning",
        "gain": gains,
        "aim": "runs with correction gain at least half of what sync gains, mean over seeds",
        "met": "sync" in gains and all(value >= gains["sync"] / 2 for value in corrected),
        "runs": found,
        "seeds": arguments.seeds,
        "steps": arguments.steps,
        "heldout": arguments.heldout,
        "date": learning.today(),
        **learning.revision(),
        "machine": machine_facts(),
    }
    (directory / "async_learning.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
