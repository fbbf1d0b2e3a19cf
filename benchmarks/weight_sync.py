"""How fast weights travel: every transport, each installed engine, 100 MB to 1 GB, against plain copying.

    python benchmarks/weight_sync.py [--sizes-mb 100 500 1000] [--transports ...] [--engines transformers ...]

A trainer's process streams the tensors of a Llama-shaped model from its memory; a generator's process takes them. For
each size: what ``memcpy`` does with the same tensors; each transport with a generator that takes and forgets
(``transfer``: the transport alone); each transport with each engine, from the first byte to the confirmed version
(``engine``), against the engine taking the same tensors out of its own memory (``from_memory``). Then the payload of
``delta`` after one AdamW step. Printed last, one JSON line.

``*_by_cpu`` compares CPU seconds, of the busier of the two processes: what wall time would be on a machine where each
has a core to itself. On a busy machine trust these.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from machine import machine_facts
from torch import Tensor, multiprocessing
from weight_sync_end import Load, generator_end

from chatlearn_core.plugins.compatibility import shared_channel
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.records import Channel, GeneratorSpec, WeightSyncSpec
from chatlearn_core.testing.model_directory import manifest_of
from chatlearn_core.types import Endpoint, SyncPlan, WeightShard

MB = 1 << 20
VOCABULARY = 32_000
TRANSFER_AIM = 0.5
"""Of memcpy."""
ENGINE_AIM = 1.2
"""Times what the engine takes to load from memory."""
LEARNING_RATE = 1e-6
"""As RL runs have it: in bfloat16 most weights do not move in one step."""
TIMEOUT_S = 300.0
ENDS = ("trainer", "generator")


def model_config(size_mb: int, dtype: torch.dtype) -> Any:
    """A Llama whose weights have about ``size_mb``."""
    from transformers import LlamaConfig

    elements = size_mb * MB / dtype.itemsize
    hidden = 64 * max(1, round((elements / 130) ** (1 / 3) / 64 * 3.2))
    layers = max(1, round((elements - VOCABULARY * hidden) / (16 * hidden * hidden)))
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )


def write_model(directory: Path, size_mb: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Write a model directory with a tokenizer; returns its tensors by checkpoint name."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from chatlearn_core.testing.model_directory import read_checkpoint

    model = LlamaForCausalLM(model_config(size_mb, dtype)).to(dtype)
    model.save_pretrained(directory)
    words = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(directory)
    return read_checkpoint(directory)


class MemoryTrainer:
    """Streams tensors out of this process's memory, as one rank does."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def weights(self, export: str = "full_tensors", payload: str = "full") -> Iterator[WeightShard]:
        for name, tensor in self.tensors.items():
            shape = tuple(tensor.shape)
            yield WeightShard(name, shape, tuple((0, size) for size in shape), 0, tensor)


class TrainerEnd:
    """The trainer's process: a sender, and a pipe to the generator's process that stands for the runtime."""

    def __init__(
        self, record: WeightSyncSpec, channel: Channel, load: Load, model: Path, engine: str, dtype: str
    ) -> None:
        registry = discover_plugins()
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(
            target=generator_end, args=(other, record.name, load, str(model), engine, dtype), daemon=True
        )
        self._process.start()
        options = registry.load_options(record)()
        self._here = Endpoint("trainer", 0, 0, socket.gethostname(), "cpu", os.getpid())
        self._there: Endpoint = self._ask("ready")
        self._channel: Channel = channel
        self._sender = registry.load_factory(record, "sender")(options, self._here)
        self._version = 0
        self._base: int | None = None

    def sync(self, trainer: MemoryTrainer, workspace: Path, bucket_mb: int, *, delta: bool = False) -> dict[str, Any]:
        """One sync; seconds from the offer to the generator's confirmation, and what else was measured."""
        self._version += 1
        plan = SyncPlan(
            sync_id=f"v{self._version}",
            policy_version=self._version,
            base_version=None,
            payload="full",
            channel=self._channel,
            manifest=manifest_of(trainer.tensors),
            senders=(self._here,),
            receivers=(self._there,),
            fleet_rule="barrier",
            bucket_bytes=bucket_mb * MB,
            timeout_s=TIMEOUT_S,
            workspace=str(workspace),
        )
        if delta and self._base is not None:
            plan = replace(plan, payload="delta", base_version=self._base)
        self._ask("begin", plan)
        reset_peak()
        before, start, cpu_start = resident_mb(), time.perf_counter(), time.process_time()
        offer = self._sender.offer(plan)
        self._pipe.send(("receive", plan, offer))
        sent: list[int] = []
        failure: list[BaseException] = []

        def send() -> None:
            try:
                sent.append(self._sender.send(plan, trainer))
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        answer = self._pipe.recv()
        thread.join()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        self._sender.release(plan)
        if failure or isinstance(answer, str):
            raise RuntimeError(f"{answer}; {failure}")
        self._base = self._version
        return {
            "s": seconds,
            "bytes": answer["bytes"],
            "peak_mb": {"trainer": peak_mb() - before, "generator": answer["peak_mb"]},
            "cpu_s": {"trainer": cpu, "generator": answer["cpu_s"]},
        }

    def from_memory(self, tensors: Mapping[str, Tensor]) -> tuple[float, float]:
        """Seconds, and CPU seconds, of the engine taking the same tensors out of its own process's memory."""
        seconds, cpu = self._ask("from_memory", manifest_of(tensors))
        return seconds, cpu

    def _ask(self, *message: Any) -> Any:
        self._pipe.send(message)
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        self._sender.close()
        self._pipe.send(("close",))
        self._process.join(60)


def reset_peak() -> None:
    """Let the kernel forget the peak of the resident set."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_mb() -> float:
    return _status("VmRSS") / 1024


def peak_mb() -> float:
    return _status("VmHWM") / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def memcpy_s(tensors: Mapping[str, Tensor], repeats: int) -> tuple[float, float]:
    """Seconds, and CPU seconds, of copying the same tensors into memory that was touched before."""
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    seconds, cpu = [], []
    for _ in range(repeats + 1):
        start, cpu_start = time.perf_counter(), time.process_time()
        for name, tensor in tensors.items():
            target[name].copy_(tensor)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    return statistics.median(seconds[1:]), statistics.median(cpu[1:])


def total_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def optimizer_step(tensors: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Every tensor after one AdamW step on float32 weights, rounded back to its own dtype."""
    generator = torch.Generator().manual_seed(seed)
    stepped = {}
    for name, tensor in tensors.items():
        weight = torch.nn.Parameter(tensor.float())
        weight.grad = torch.randn(weight.shape, generator=generator)
        torch.optim.AdamW([weight], lr=LEARNING_RATE).step()
        stepped[name] = weight.detach().to(tensor.dtype)
    return stepped


def measure(end: TrainerEnd, tensors: Mapping[str, Tensor], workspace: Path, bucket_mb: int, repeats: int) -> Any:
    """The first sync, and the median of the following ones."""
    trainer = MemoryTrainer(tensors)
    runs = [end.sync(trainer, workspace, bucket_mb) for _ in range(repeats + 1)]
    warm = [run["s"] for run in runs[1:]]
    return {
        "first_s": round(runs[0]["s"], 3),
        "s": round(statistics.median(warm), 4),
        "range_s": [round(min(warm), 4), round(max(warm), 4)],
        "gb_s": round(total_bytes(tensors) / statistics.median(warm) / 1e9, 2),
        "cpu_s": {end: round(statistics.median(run["cpu_s"][end] for run in runs[1:]), 4) for end in ENDS},
        "peak_extra_mb": {end: round(max(run["peak_mb"][end] for run in runs), 1) for end in ENDS},
    }


def measure_delta(model: Path, tensors: Mapping[str, Tensor], workspace: Path, bucket_mb: int) -> dict[str, Any]:
    """A full version, and what one optimizer step changes of it."""
    record = record_of("delta")
    end = TrainerEnd(record, "tensors", "forget", model, "", "")
    try:
        full = end.sync(MemoryTrainer(tensors), workspace, bucket_mb)
        changed = optimizer_step(tensors, seed=1)
        delta = end.sync(MemoryTrainer(changed), workspace, bucket_mb, delta=True)
    finally:
        end.close()
    elements = sum(tensor.numel() for tensor in tensors.values())
    moved = sum(int((changed[name] != tensors[name]).sum()) for name in tensors)
    return {
        "payload_share": round(delta["bytes"] / full["bytes"], 4),
        "changed_share": round(moved / elements, 4),
        "learning_rate": LEARNING_RATE,
        "full_s": round(full["s"], 3),
        "s": round(delta["s"], 3),
    }


def record_of(name: str) -> WeightSyncSpec:
    record = discover_plugins().select("weight_sync", name, "--transports")
    assert isinstance(record, WeightSyncSpec)
    return record


def measure_size(size_mb: int, arguments: argparse.Namespace) -> dict[str, Any]:
    dtype = getattr(torch, arguments.dtype)
    registry = discover_plugins()
    with tempfile.TemporaryDirectory() as scratch:
        model, workspace = Path(scratch) / "model", Path(scratch) / "workspace"
        tensors = write_model(model, size_mb, dtype)
        copy_s, copy_cpu_s = memcpy_s(tensors, arguments.repeats)
        row: dict[str, Any] = {
            "mb": round(total_bytes(tensors) / MB, 1),
            "tensors": len(tensors),
            "memcpy_gb_s": round(total_bytes(tensors) / copy_s / 1e9, 2),
            "memcpy_cpu_s": round(copy_cpu_s, 4),
            "transfer": {},
            "engine": {},
        }
        for name in arguments.transports:
            record = record_of(name)
            channel: Channel = "tensors" if "tensors" in record.channels else record.channels[0]
            end = TrainerEnd(record, channel, "forget", model, "", "")
            try:
                measured = measure(end, tensors, workspace, arguments.bucket_mb, arguments.repeats)
            finally:
                end.close()
            measured["of_memcpy"] = round(copy_s / measured["s"], 2)
            measured["of_memcpy_by_cpu"] = round(copy_cpu_s / max(measured["cpu_s"].values()), 2)
            row["transfer"][name] = measured
            print(f"{size_mb:>5} MB {name:>14} alone: {measured}", flush=True)
        for engine in arguments.engines:
            generator = registry.select("generator", engine, "--engines")
            assert isinstance(generator, GeneratorSpec)
            row["engine"][engine] = {}
            for name in arguments.transports:
                record = record_of(name)
                found = shared_channel(record, generator)
                if found is None:
                    continue
                end = TrainerEnd(record, found, "engine", model, engine, arguments.dtype)
                try:
                    alone = [end.from_memory(tensors) for _ in range(arguments.repeats + 1)][1:]
                    measured = measure(end, tensors, workspace, arguments.bucket_mb, arguments.repeats)
                finally:
                    end.close()
                measured["channel"] = found
                load_s, load_cpu_s = (statistics.median(one[i] for one in alone) for i in (0, 1))
                measured["from_memory_s"] = round(load_s, 4)
                measured["over_from_memory"] = round(measured["s"] / load_s, 2)
                measured["over_from_memory_by_cpu"] = round(max(measured["cpu_s"].values()) / load_cpu_s, 2)
                row["engine"][engine][name] = measured
                print(f"{size_mb:>5} MB {name:>14} into {engine}: {measured}", flush=True)
        row["delta"] = measure_delta(model, tensors, workspace, arguments.bucket_mb)
        print(f"{size_mb:>5} MB delta: {row['delta']}", flush=True)
        return row


def fastest(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The figures that the aims are about, of ``shared_memory``, the fastest between processes; worst over sizes."""
    shares = [row["transfer"]["shared_memory"]["of_memcpy"] for row in rows if "shared_memory" in row["transfer"]]
    ratios = [
        engine["shared_memory"]["over_from_memory"]
        for row in rows
        for engine in row["engine"].values()
        if "shared_memory" in engine
    ]
    return {"transfer_of_memcpy": min(shares, default=math.nan), "over_from_memory": max(ratios, default=math.nan)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes-mb", type=int, nargs="+", default=[100, 500, 1000])
    parser.add_argument(
        "--transports", nargs="+", default=["shared_memory", "broadcast", "delta", "checkpoint"], metavar="NAME"
    )
    parser.add_argument("--engines", nargs="*", default=["transformers"], metavar="NAME")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5, help="syncs after the first")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="next to nothing, to see that it works")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.sizes_mb, arguments.repeats = [8], 1
    torch.set_num_threads(arguments.threads)
    rows = [measure_size(size, arguments) for size in arguments.sizes_mb]
    figures = fastest(rows)
    result = {
        "benchmark": "weight_sync",
        "dtype": arguments.dtype,
        "bucket_mb": arguments.bucket_mb,
        "rows": rows,
        **figures,
        "aim": {"transfer_of_memcpy": TRANSFER_AIM, "over_from_memory": ENGINE_AIM},
        "met": figures["transfer_of_memcpy"] >= TRANSFER_AIM and figures["over_from_memory"] <= ENGINE_AIM,
        "machine": machine_facts(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
