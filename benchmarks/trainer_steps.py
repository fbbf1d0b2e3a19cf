"""Training throughput of the trainer ``fsdp`` against the same model trained by a plain transformers loop, in one run.

On a GPU a 0.6B-parameter Qwen3 configuration with random weights computes in bfloat16 over float32 masters; on a CPU a
tiny one in float32. All ways take the same optimizer step on the same sequences and must find the same gradient norm:

- packed: ``fsdp``, sequences packed into micro-batches by token budget;
- unpacked: ``fsdp``, one sequence a micro-batch;
- plain: transformers, padded micro-batches in order of length, logits whole, autocast.

Tokens are real ones (padding does no work that counts). ``mfu`` is 6 N FLOPs a token (N: matrix parameters, the head
included), plus attention's 6 * layers * heads * head size * length a token (causal), over the data sheet's peak;
``matmul_share`` is over the rate of a large matrix product measured in the same run.

    python benchmarks/trainer_steps.py [--rounds 5] [--sequences 64] [--quick]
    torchrun --nproc-per-node 2 benchmarks/trainer_steps.py     # sharded; without the plain loop

Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import installed_version, machine_facts
from transformers import AutoConfig, AutoModelForCausalLM

from chatlearn_algorithms.sft import SFTLoss
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_core.types import TrainBatch, cumulative_lengths
from chatlearn_fsdp.options import FSDPOptions
from chatlearn_fsdp.trainer import FSDPTrainer
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_trainer_kit.optimizer import build_optimizer

SEED = 5
QWEN3_0_6B: dict[str, Any] = {
    "hidden": 1024,
    "layers": 28,
    "heads": 16,
    "kv_heads": 8,
    "intermediate": 3072,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_length": 40_960,
    "initializer_range": 0.02,
}
TINY: dict[str, Any] = {"hidden": 128, "layers": 4, "heads": 8, "kv_heads": 4, "intermediate": 384, "max_length": 4096}
DENSE_BF16_PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""FLOP/s without sparsity, from the data sheets."""
NORM_TOLERANCE = {"cpu": 1e-3, "cuda": 0.05}
"""Relative: float32 sums over other orders, bfloat16 rounding."""


def make_batch(lengths: Sequence[int]) -> TrainBatch:
    """Random tokens; the first half of every sequence is a prompt."""
    generator = torch.Generator().manual_seed(SEED)
    bounds = cumulative_lengths(list(lengths))
    mask = torch.cat([torch.arange(n) >= max(1, n // 2) for n in lengths])
    batch = TrainBatch(
        sample_ids=tuple(f"s{i}" for i in range(len(lengths))),
        token_ids=torch.randint(0, 300, (sum(lengths),), generator=generator),
        cu_seqlens=bounds,
        loss_mask=mask,
        unit_index=torch.arange(len(lengths)),
        group_index=torch.arange(len(lengths)),
    )
    return SFTLoss().prepare(batch)


def draw_lengths(count: int, longest: int) -> list[int]:
    """Log-normal lengths as completions have, cut at ``longest``."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.exp(torch.randn(count, generator=generator) * 0.6) * (longest / 4)
    return [int(n) for n in drawn.clamp(8, longest)]


class FSDPWay:
    """One optimizer step through the trainer, on this rank's slice."""

    def __init__(self, model: str, batch: TrainBatch, device: str, **options: Any) -> None:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        # torchrun itself listens on MASTER_PORT, and tells torch to expect a listener on any other port too.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        port = int(os.environ.get("MASTER_PORT", "29500")) + 1
        context = RoleContext(
            "trainer",
            ModelSource(model, model),
            rank=rank,
            world_size=world,
            device=device,
            trainable=True,
            rendezvous=f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{port}" if world > 1 else None,
        )
        self.trainer = FSDPTrainer(FSDPOptions(learning_rate=1e-5, **options), context)
        self.trainer.setup()
        self.batch, self.loss = batch.select(range(rank, batch.num_sequences, world)), SFTLoss()

    def step(self) -> float | None:
        """The gradient norm before clipping, on rank 0."""
        norm = self.trainer.update(self.batch, self.loss).get("grad_norm")
        return norm.value if norm is not None else None

    def close(self) -> None:
        self.trainer.close()


class PlainWay:
    """One optimizer step of a plain transformers model on padded micro-batches of similar lengths."""

    def __init__(self, model: str, batch: TrainBatch, device: str, budget: int, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        self.model.to(device).train()
        self.optimizer = build_optimizer(self.model, FSDPOptions(learning_rate=1e-5))
        self.batch, self.device, self.dtype = batch, device, dtype
        self.cuts: list[list[int]] = []
        # Sorted by length, so that a micro-batch's width is its first sequence's.
        for index in sorted(range(batch.num_sequences), key=lambda i: -batch.lengths[i]):
            last = self.cuts[-1] if self.cuts else None
            if last is not None and (len(last) + 1) * batch.lengths[last[0]] <= budget:
                last.append(index)
            else:
                self.cuts.append([index])

    def step(self) -> float:
        """The gradient norm before clipping."""
        bounds = self.batch.cu_seqlens.tolist()
        for cut in self.cuts:
            width = self.batch.lengths[cut[0]]
            rows = torch.zeros(4, len(cut), width)
            for row, i in enumerate(cut):
                place = slice(bounds[i], bounds[i + 1])
                length = bounds[i + 1] - bounds[i]
                rows[0, row, :length] = self.batch.token_ids[place]
                rows[1, row, :length] = 1
                rows[2, row, :length] = self.batch.token_data["loss_weight"][place]
            rows = rows.to(self.device)
            ids = rows[0].long()
            with torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32):
                logits = self.model(ids, attention_mask=rows[1].long(), use_cache=False).logits
            losses = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
            )
            (losses * rows[2][:, 1:].flatten()).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def close(self) -> None:
        del self.model, self.optimizer


def step_flops(model: str, lengths: Sequence[int]) -> float:
    """FLOPs of one forward and backward pass over these sequences, as the module's text defines them."""
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    config = shell.config
    matrices = sum(p.numel() for name, p in shell.named_parameters() if p.dim() == 2 and "embed" not in name)
    matrices += config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return float(sum(6 * matrices * n + attention * n * n for n in lengths))


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product."""
    size = 8192 if device == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = [timed(lambda: left @ right, device) for _ in range(8)]
    return 2 * size**3 / min(seconds)


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds, the device's included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="few short sequences, one round")
    arguments = parser.parse_args()
    rounds, count = (1, 12) if arguments.quick else (arguments.rounds, arguments.sequences)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else "cpu"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if device == "cuda":
        torch.cuda.set_device(place)
    else:
        torch.set_num_threads(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    longest, budget = (4096, 8192) if device == "cuda" else (512, 2048)
    lengths = draw_lengths(count, longest)
    batch = make_batch(lengths)
    options = {"param_dtype": "bfloat16" if device == "cuda" else "float32"}

    with tempfile.TemporaryDirectory() as directory:
        model = str(build_tiny_model(Path(directory) / "model", "qwen3", **(QWEN3_0_6B if device == "cuda" else TINY)))
        makers: dict[str, Callable[[], FSDPWay | PlainWay]] = {
            "packed": lambda: FSDPWay(model, batch, place, max_tokens_per_micro_batch=budget, **options),
            "unpacked": lambda: FSDPWay(model, batch, place, max_tokens_per_micro_batch=1, **options),
        }
        if world == 1:
            makers["plain"] = lambda: PlainWay(model, batch, device, budget, dtype)
        seconds: dict[str, list[float]] = {name: [] for name in makers}
        norms: dict[str, float | None] = {}
        peaks: dict[str, float] = {}
        # A way at a time, rounds interleaved as far as memory goes: models are made anew, the first step warms up.
        for round_ in range(rounds):
            for name, make in makers.items():
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                way = make()
                norm = way.step()
                norms.setdefault(name, norm)
                seconds[name] += [timed(way.step, device) for _ in range(1 if arguments.quick else 3)]
                way.close()
                del way
                if device == "cuda" and round_ == 0:
                    peaks[name] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
                    torch.cuda.empty_cache()
        flops, rate = step_flops(model, lengths), matmul_rate(device, dtype)

    if int(os.environ.get("RANK", "0")):
        return
    reference = norms["packed"]
    assert reference is not None, "rank 0 reports it"
    for name, norm in norms.items():
        assert norm is not None
        tolerance = NORM_TOLERANCE[device]
        assert abs(norm - reference) <= tolerance * reference, f"{name} finds gradient norm {norm}, packed {reference}"
    name_of_device = torch.cuda.get_device_name() if device == "cuda" else None
    peak = next((value for name, value in DENSE_BF16_PEAK.items() if name in (name_of_device or "")), None)
    results: dict[str, Any] = {}
    for name, values in seconds.items():
        step_s = statistics.median(values)
        results[name] = {
            "step_s": round(step_s, 4),
            "spread_s": [round(min(values), 4), round(max(values), 4)],
            "tokens_per_s": round(sum(lengths) / step_s),
            "mfu": round(flops / step_s / (peak * world), 4) if peak is not None else None,
            "matmul_share": round(flops / step_s / (rate * world), 4),
            "grad_norm": norms[name],
            "peak_memory_gib": peaks.get(name),
        }
        print(f"{name:9} {step_s:8.3f} s a step, {results[name]['tokens_per_s']:8d} tokens/s")
    workload = {"sequences": count, "tokens": sum(lengths), "longest": max(lengths), "budget_tokens": budget}
    line = {
        "benchmark": "trainer_steps",
        "aim": "packed, at least as many tokens a second as the plain loop",
        "met": "plain" not in results or results["packed"]["tokens_per_s"] >= results["plain"]["tokens_per_s"],
        "ranks": world,
        "workload": workload,
        "ways": results,
        "matmul_tflops": round(rate / 1e12, 3),
        "rounds": rounds,
        "gpu": name_of_device,
        "transformers": installed_version("transformers"),
        "machine": machine_facts(),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
