"""Step time of every trainer and layout of ranks on the same work, and its share outside forward, backward, optimizer.

Every way takes the same optimizer steps (SFT, packed) on the same sequences and must find the same gradient norm. Ways
with several ranks share this machine's cores or GPUs, so compare them with each other: on two cores, two ranks take as
long as one at best. ``outside_share`` is the share of a step that the trainer spends outside the library's forward and
backward passes and its optimizer: packing, moving tensors, the loss, metrics, agreement between ranks. With pipeline
stages, the backward time includes waiting for the other stages. ``mfu`` (GPUs only) is that of ``trainer_steps.py``,
over the peak of as many GPUs as ranks; ``matmul_share`` the same over the rate of as many large matrix products.

    python benchmarks/trainer_layouts.py [--rounds 3] [--sequences 64] [--quick]

Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from machine import installed_version, machine_facts
from trainer_ranks import ONE_RANK, TWO_RANKS, Layout, run_processes, run_ranks
from trainer_steps import (
    DENSE_BF16_PEAK,
    NORM_TOLERANCE,
    QWEN3_0_6B,
    TINY,
    PlainWay,
    draw_lengths,
    make_batch,
    matmul_rate,
    step_flops,
    timed,
)

from chatlearn_algorithms.sft import SFTLoss
from chatlearn_core.protocols import Trainer
from chatlearn_core.types import Metrics, TrainBatch
from chatlearn_hf.tiny import build_tiny_model

PHASES = ("timing_s/forward", "timing_s/backward", "timing_s/optimizer")
MOST_OUTSIDE = 0.05
PLAIN = "plain transformers"


def steps_of(trainer: Trainer, batch: TrainBatch, steps: int, device: str) -> dict[str, Any]:
    """Take one step to warm up and ``steps`` more on this rank's slice; seconds of each, and those of the phases."""
    own = batch.select(range(trainer.data_parallel_rank, batch.num_sequences, trainer.data_parallel_size))
    loss = SFTLoss()
    first = trainer.update(own, loss)
    taken: list[Metrics] = []
    seconds = [timed(lambda: taken.append(trainer.update(own, loss)), device) for _ in range(steps)]
    # One of the ranks that share a slice reports.
    inside = [sum(metrics[name].value for name in PHASES) for metrics in taken if PHASES[0] in metrics]
    norm = first.get("grad_norm")
    return {
        "seconds": seconds,
        "inside": inside,
        "grad_norm": norm.value if norm is not None else None,
        "peak": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


def plain_steps(
    _: int, __: str, model: str, batch: TrainBatch, device: str, budget: int, dtype: torch.dtype, steps: int
) -> dict[str, Any]:
    """Take the same steps with the plain loop, in a process of its own, which gives all its memory back."""
    torch.set_num_threads(1)
    way = PlainWay(model, batch, device, budget, dtype)
    norm = way.step()
    seconds = [timed(way.step, device) for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {"seconds": seconds, "grad_norm": norm, "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--budget", type=int, help="tokens of a micro-batch; 2048 on a CPU, 16384 on a GPU")
    parser.add_argument("--plain-budget", type=int, help="the plain loop's, which holds all logits; 8192 at most")
    parser.add_argument("--quick", action="store_true", help="few sequences, three layouts, one round")
    arguments = parser.parse_args()
    rounds, steps, count = (1, 1, 12) if arguments.quick else (arguments.rounds, 3, arguments.sequences)
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    longest, budget = (4096, arguments.budget or 16_384) if on_gpu else (512, arguments.budget or 2048)
    plain_budget = arguments.plain_budget or min(budget, 8192)
    lengths = draw_lengths(count, longest)
    batch = make_batch(lengths)
    ways = [*ONE_RANK, *(TWO_RANKS if not on_gpu or torch.cuda.device_count() > 1 else ())]
    if on_gpu and installed_version("transformer-engine") is not None:
        ways.append(Layout("megatron, own layers", "megatron", 1, {"transformer_engine": False}))
    if arguments.quick:
        ways = [way for way in ways if way.name in ("fsdp, 1 rank", "megatron, PP 2", "deepspeed, ZeRO-3")]
    options = {
        "learning_rate": 1e-5,
        "max_tokens_per_micro_batch": budget,
        "param_dtype": "bfloat16" if on_gpu else "float32",
    }
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {}
    outside: dict[str, list[float]] = {}
    norms: dict[str, float] = {}
    peaks: dict[str, int | None] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = str(build_tiny_model(Path(directory) / "model", "qwen3", **(QWEN3_0_6B if on_gpu else TINY)))
        for round_ in range(rounds):
            [plain] = run_processes(plain_steps, 1, PLAIN, model, batch, device, plain_budget, dtype, steps)
            norms[PLAIN], peaks[PLAIN] = plain["grad_norm"], plain["peak"]
            seconds.setdefault(PLAIN, []).extend(plain["seconds"])
            for way in ways:
                ranks = run_ranks(way, model, options, steps_of, batch, steps, device)
                seconds.setdefault(way.name, []).extend(
                    max(rank["seconds"][step] for rank in ranks) for step in range(steps)
                )
                for rank in ranks:
                    pairs = zip(rank["inside"], rank["seconds"][-len(rank["inside"]) :], strict=True)
                    if rank["inside"]:
                        outside.setdefault(way.name, []).extend(1.0 - inside / whole for inside, whole in pairs)
                norms[way.name] = next(rank["grad_norm"] for rank in ranks if rank["grad_norm"] is not None)
                peaks[way.name] = max((rank["peak"] for rank in ranks if rank["peak"] is not None), default=None)
                print(f"round {round_ + 1}: {way.name:24} {seconds[way.name][-1]:8.3f} s", flush=True)
        flops, rate = step_flops(model, lengths), matmul_rate(device, dtype)
    ranks_of = {way.name: way.world for way in ways}
    gpu = torch.cuda.get_device_name() if on_gpu else None
    peak = next((value for name, value in DENSE_BF16_PEAK.items() if name in (gpu or "")), None)
    results: dict[str, Any] = {}
    reference = norms[PLAIN]
    for name, values in seconds.items():
        assert abs(norms[name] - reference) <= NORM_TOLERANCE[device] * reference, (
            f"{name} finds gradient norm {norms[name]}, plain transformers {reference}"
        )
        step_s = statistics.median(values)
        results[name] = {
            "step_s": round(step_s, 4),
            "spread_s": [round(min(values), 4), round(max(values), 4)],
            "tokens_per_s": round(sum(lengths) / step_s),
            "mfu": round(flops / step_s / (peak * ranks_of.get(name, 1)), 4) if peak is not None else None,
            "matmul_share": round(flops / step_s / (rate * ranks_of.get(name, 1)), 4),
            "outside_share": round(statistics.median(outside[name]), 4) if name in outside else None,
            "grad_norm": norms[name],
            "peak_memory_gib": round(most / 2**30, 2) if (most := peaks[name]) is not None else None,
        }
    line = {
        "benchmark": "trainer_layouts",
        "aim": f"at most {MOST_OUTSIDE:.0%} of a step outside forward, backward and optimizer",
        "met": all(way["outside_share"] is None or way["outside_share"] <= MOST_OUTSIDE for way in results.values()),
        "workload": {
            "sequences": count,
            "tokens": sum(lengths),
            "longest": max(lengths),
            "budget_tokens": budget,
            "plain_budget_tokens": plain_budget,
        },
        "ways": results,
        "rounds": rounds,
        "steps": steps,
        "gpu": gpu,
        "versions": {
            name: installed_version(name)
            for name in ("transformers", "megatron-core", "transformer-engine", "deepspeed")
        },
        "machine": machine_facts(),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
