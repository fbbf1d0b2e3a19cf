"""Seconds and peak extra memory of streaming a trainer's weights, whole tensors against each rank's own parts.

Every rank runs through the stream and drops each tensor, as a transport does once it has copied it. ``extra_mib`` is
the most memory a rank had beyond what it had before the stream began; a stream of whole tensors gathers one at a time,
so the largest tensor is the measure to compare it with. Parts (``boxes``) need no communication, and each is sent by
one rank; ``sent_share`` is the largest share of the model's bytes that one rank sends.

    python benchmarks/weight_export.py [--rounds 3] [--hidden 768] [--layers 12] [--quick]

Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from machine import installed_version, machine_facts
from trainer_ranks import FOUR_RANKS, ONE_RANK, TWO_RANKS, exports_of, run_ranks

from chatlearn_core.plugins.records import Export
from chatlearn_core.protocols import Trainer
from chatlearn_hf.tiny import build_tiny_model

MIB = 2**20
NAMES = (
    "fsdp, 1 rank",
    "fsdp, 2 ranks",
    "megatron, 1 rank",
    "megatron, TP 2 with SP",
    "megatron, PP 2",
    "megatron, TP 2 x PP 2",
    "deepspeed, ZeRO-3",
)
SAMPLING_S = 0.002


class PeakMemory:
    """The most memory of this process while the context is open, beyond what it had at its start, in bytes."""

    def __enter__(self) -> PeakMemory:
        self.extra = 0
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return self
        self._before, self._most = resident(), 0
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.extra = torch.cuda.max_memory_allocated() - self._before
            return
        self._ended.set()
        self._watcher.join()
        self.extra = max(0, self._most - self._before)

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLING_S):
            self._most = max(self._most, resident())


def resident() -> int:
    """Resident memory of this process, bytes."""
    text = Path("/proc/self/statm").read_text(encoding="ascii")
    return int(text.split()[1]) * 4096


def stream(trainer: Trainer, export: Export, rounds: int) -> dict[str, Any]:
    """Run through the stream ``rounds`` times after a first one, which warms up."""
    answer: dict[str, Any] = {"seconds": [], "extra": [], "largest": 0}
    for round_ in range(rounds + 1):
        with PeakMemory() as memory:
            began, sent, largest = time.perf_counter(), 0, 0
            for shard in trainer.weights(export):
                largest = max(largest, shard.tensor.nbytes)
                sent += shard.tensor.nbytes if shard.owner_rank == trainer.context.rank else 0  # type: ignore[attr-defined]
            seconds = time.perf_counter() - began
        if round_:
            answer["seconds"].append(seconds)
            answer["extra"].append(memory.extra)
        answer |= {"sent": sent, "largest": largest}
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="a tiny model, two layouts, one round")
    arguments = parser.parse_args()
    hidden, layers, rounds = (arguments.hidden, arguments.layers, arguments.rounds)
    names: tuple[str, ...] = NAMES
    if arguments.quick:
        hidden, layers, rounds, names = 64, 2, 1, ("megatron, PP 2", "deepspeed, ZeRO-3")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 4
    ways = [way for way in (*ONE_RANK, *TWO_RANKS, *FOUR_RANKS) if way.name in names and way.world <= available]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = build_tiny_model(
            Path(directory) / "model", "qwen3", hidden=hidden, layers=layers, heads=8, kv_heads=4,
            intermediate=3 * hidden, vocab_size=32_000,
        )  # fmt: skip
        files = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        for way in ways:
            for export in ("full_tensors", "boxes"):
                if export not in exports_of(way):
                    continue
                ranks = run_ranks(way, str(model), {"learning_rate": 1e-5}, stream, export, rounds)
                seconds = [max(rank["seconds"][n] for rank in ranks) for n in range(rounds)]
                results[f"{way.name}, {export}"] = {
                    "seconds": round(statistics.median(seconds), 4),
                    "spread_s": [round(min(seconds), 4), round(max(seconds), 4)],
                    "extra_mib": [round(statistics.median(rank["extra"]) / MIB, 1) for rank in ranks],
                    "largest_mib": round(max(rank["largest"] for rank in ranks) / MIB, 1),
                    "sent_share": round(max(rank["sent"] for rank in ranks) / sum(rank["sent"] for rank in ranks), 3),
                }
                print(f"{way.name}, {export}: {results[f'{way.name}, {export}']}", flush=True)
    largest = max(entry["largest_mib"] for entry in results.values())
    line = {
        "benchmark": "weight_export",
        "aim": "no rank needs more extra memory than three of the largest tensors, and less than the whole model",
        "met": all(
            max(entry["extra_mib"]) <= 3 * largest and (arguments.quick or max(entry["extra_mib"]) < files / MIB)
            for entry in results.values()
        ),
        "model_mib": round(files / MIB, 1),
        "ways": results,
        "rounds": rounds,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: installed_version(name) for name in ("transformers", "megatron-core", "deepspeed")},
        "machine": machine_facts(),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
