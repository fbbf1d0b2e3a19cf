"""How much of what is computed is real on GSM8K lengths, and step time of packed against padded micro-batches.

Aims: 98% of the token positions that go through the model's layers are real; a packed step is faster than padded ones.
Both ways train the same model on the same sequences with the same loss and optimizer, under the same budget of
*computed* tokens a micro-batch, and must arrive at the same gradient norm:

- packed: ``chatlearn_fsdp``'s trainer, unpadded;
- padded: plain transformers with an attention mask, micro-batches cut from the sequences as they come;
- padded_sorted: the same after sorting by length, the best that padding can do.

    python benchmarks/packing.py [--data GSM8K_DIRECTORY] [--rounds 5] [--quick]

Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gsm8k_lengths import FILE, embedded_lengths, measured_lengths
from machine import installed_version, machine_facts
from transformers import AutoModelForCausalLM

from chatlearn_algorithms.sft import SFTLoss
from chatlearn_core.batching import micro_batches
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_core.types import TrainBatch, cumulative_lengths
from chatlearn_fsdp.options import FSDPOptions
from chatlearn_fsdp.trainer import FSDPTrainer
from chatlearn_hf.tiny import build_tiny_model, build_tiny_tokenizer
from chatlearn_hf.varlen_attention import PackedLayout
from chatlearn_losses import token_logprobs
from chatlearn_trainer_kit.optimizer import build_optimizer

AIM = 0.98
SEED = 3
OPTIONS = FSDPOptions(learning_rate=1e-4)
NORM_TOLERANCE = 1e-3
"""Relative; float32 sums over other orders."""


class PackedWay:
    """One optimizer step through the trainer ``fsdp``."""

    def __init__(self, model: str, batch: TrainBatch, budget: int) -> None:
        options = OPTIONS.model_copy(update={"max_tokens_per_micro_batch": budget})
        source = ModelSource(path=model, tokenizer_path=model)
        self.trainer = FSDPTrainer(
            options,
            RoleContext(role="trainer", model=source, device="cpu", seed=SEED, trainable=True, total_updates=100),
        )
        self.trainer.setup()
        packed = self.trainer._model  # the benchmark looks inside: no public way leads to the layers
        assert packed is not None, "setup made it"
        self.module: torch.nn.Module = packed.model
        self.loss = SFTLoss()
        self.batch = batch

    def step(self) -> float:
        """Returns the gradient norm before clipping."""
        return self.trainer.update(self.batch, self.loss)["grad_norm"].value


class PaddedWay:
    """One optimizer step of a plain transformers model on padded micro-batches."""

    def __init__(self, model: str, batch: TrainBatch, budget: int, *, by_length: bool) -> None:
        self.module: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.module.train()
        self.optimizer = build_optimizer(self.module, OPTIONS)
        self.batch = batch
        self.cuts = padded_cuts(batch.lengths, budget, by_length=by_length)

    def step(self) -> float:
        """Returns the gradient norm before clipping."""
        for cut in self.cuts:
            token_ids, mask, weight = padded(self.batch, cut)
            logits = self.module(input_ids=token_ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            labels = token_ids[:, 1:].reshape(-1)
            scored = token_logprobs(logits.reshape(-1, logits.shape[-1]), labels)
            (-(weight[:, 1:].reshape(-1) * scored.logprobs).sum()).backward()
        assert OPTIONS.grad_clip is not None
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), OPTIONS.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)


def padded_cuts(lengths: Sequence[int], budget: int, *, by_length: bool) -> list[list[int]]:
    """Micro-batches in order, each as long as sequences x longest stays within the budget."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i]) if by_length else range(len(lengths))
    cuts: list[list[int]] = [[]]
    for index in order:
        longest = max(lengths[i] for i in [*cuts[-1], index])
        if cuts[-1] and (len(cuts[-1]) + 1) * longest > budget:
            cuts.append([])
        cuts[-1].append(index)
    return cuts


def padded(batch: TrainBatch, cut: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, attention mask and loss weights [N, L] of these sequences, padded on the right."""
    bounds = batch.cu_seqlens.tolist()
    longest = max(bounds[i + 1] - bounds[i] for i in cut)
    token_ids = torch.zeros(len(cut), longest, dtype=torch.int64)
    mask, weight = torch.zeros_like(token_ids), torch.zeros(len(cut), longest)
    for row, index in enumerate(cut):
        start, stop = bounds[index], bounds[index + 1]
        token_ids[row, : stop - start] = batch.token_ids[start:stop]
        mask[row, : stop - start] = 1
        weight[row, : stop - start] = batch.token_data["loss_weight"][start:stop]
    return token_ids, mask, weight


def make_batch(lengths: Sequence[int], vocab_size: int) -> TrainBatch:
    """Random tokens of these lengths; every token but a sequence's first is learned."""
    generator = torch.Generator().manual_seed(SEED)
    bounds = cumulative_lengths(lengths)
    mask = torch.ones(int(bounds[-1]), dtype=torch.bool)
    mask[bounds[:-1].long()] = False
    number = torch.arange(len(lengths))
    batch = TrainBatch(
        sample_ids=tuple(str(i) for i in range(len(lengths))),
        token_ids=torch.randint(0, vocab_size, (len(mask),), generator=generator),
        cu_seqlens=bounds,
        loss_mask=mask,
        unit_index=number,
        group_index=number,
    )
    return SFTLoss().prepare(batch)


@contextmanager
def counted_positions(model: torch.nn.Module) -> Iterator[list[int]]:
    """Token positions of every call of the model's first MLP: what the layers really compute."""
    positions: list[int] = []
    layer = model.get_submodule("model.layers.0.mlp")
    handle = layer.register_forward_hook(lambda _, inputs, __: positions.append(inputs[0].shape[:-1].numel()))
    try:
        yield positions
    finally:
        handle.remove()


def attention_share(lengths: Sequence[int], budget: int) -> float:
    """Real tokens over rows inside the trainer's attention, where sequences of similar length are padded together."""
    computed = 0
    for cut in micro_batches(lengths, range(len(lengths)), budget):
        computed += sum(count * width for count, width in PackedLayout([lengths[i] for i in cut]).buckets().shapes)
    return sum(lengths) / computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="directory of GSM8K's train.jsonl")
    parser.add_argument("--sequences", type=int, default=128, help="sequences of one optimizer step")
    parser.add_argument("--budget", type=int, default=8192, help="computed tokens of one micro-batch")
    parser.add_argument("--rounds", type=int, default=5, help="times each way is timed, in turns")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads; more suffer on a busy machine")
    parser.add_argument(
        "--quick", action="store_true", help="few sequences, two rounds: checks that this program works"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    num_sequences, rounds = (16, 2) if arguments.quick else (arguments.sequences, arguments.rounds)

    everything, origin = all_lengths(arguments.data, quick=arguments.quick)
    lengths = random.Random(SEED).sample(everything, num_sequences)
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = build_tiny_tokenizer(512)
        model = str(
            build_tiny_model(
                directory, hidden=128, layers=4, intermediate=384, tokenizer=tokenizer, initializer_range=0.02
            )
        )
        batch = make_batch(lengths, len(tokenizer))
        ways: dict[str, PackedWay | PaddedWay] = {
            "packed": PackedWay(model, batch, arguments.budget),
            "padded": PaddedWay(model, batch, arguments.budget, by_length=False),
            "padded_sorted": PaddedWay(model, batch, arguments.budget, by_length=True),
        }
    result = run(ways, sum(lengths), rounds)
    share = result["ways"]["packed"]["real_share"]
    for name, figures in result["ways"].items():
        print(
            f"{name:<14} {figures['real_share']:.4f} real, {figures['step_s']:.3f} s a step {figures['step_range_s']}"
        )
    print(
        json.dumps(
            {
                "benchmark": "packing",
                "real_share": share,
                "aim": AIM,
                "met": share >= AIM and result["padded_over_packed"] > 1.0,
                **result,
                "attention_real_share": round(attention_share(lengths, arguments.budget), 4),
                "budget_fill": round(budget_fill(lengths, arguments.budget), 4),
                "lengths": {
                    "origin": origin,
                    "sequences": num_sequences,
                    "tokens": sum(lengths),
                    "mean": round(statistics.mean(lengths), 1),
                    "longest": max(lengths),
                },
                "budget_tokens": arguments.budget,
                "rounds": rounds,
                "threads": arguments.threads,
                "quick": arguments.quick,
                "transformers": installed_version("transformers"),
                "machine": machine_facts(),
            }
        )
    )


def budget_fill(lengths: Sequence[int], budget: int) -> float:
    """Tokens over the budget of the micro-batches that hold them; one above it counts with its own size."""
    filled = [sum(lengths[i] for i in batch) for batch in micro_batches(lengths, range(len(lengths)), budget)]
    return sum(filled) / sum(max(tokens, budget) for tokens in filled)


def all_lengths(data: Path | None, *, quick: bool) -> tuple[list[int], str]:
    """Lengths of GSM8K and where they come from: ``--data``, ``CHATLEARN_TEST_DATA``, or the recorded histogram."""
    root = os.environ.get("CHATLEARN_TEST_DATA")
    directory = data or (Path(root) / "gsm8k" if root else None)
    if directory is not None and (directory / FILE).is_file() and not quick:
        return measured_lengths(directory), f"measured on {FILE}"
    if data is not None and not quick:
        raise SystemExit(f"--data {data}: there is no {FILE}; give the directory that holds GSM8K's {FILE}")
    return embedded_lengths(), "recorded histogram"


def run(ways: Mapping[str, PackedWay | PaddedWay], num_tokens: int, rounds: int) -> dict[str, Any]:
    """Time each way in turns, after a first step that warms up, counts positions and compares gradient norms."""
    shares: dict[str, float] = {}
    norms: dict[str, float] = {}
    for name, way in ways.items():
        with counted_positions(way.module) as positions:
            norms[name] = way.step()
        shares[name] = num_tokens / sum(positions)
    for name, norm in norms.items():
        if abs(norm - norms["packed"]) > NORM_TOLERANCE * norms["packed"]:
            raise SystemExit(f"the ways do not do the same work: gradient norms are {norms} ({name} differs)")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            way.step()
            seconds[name].append(time.perf_counter() - start)
            cpu_seconds[name].append(time.process_time() - cpu_start)

    def over_packed(name: str) -> list[float]:
        return sorted(mine / packed for mine, packed in zip(seconds[name], seconds["packed"], strict=True))

    ratios, sorted_ratios = over_packed("padded"), over_packed("padded_sorted")
    return {
        "padded_over_packed": round(statistics.median(ratios), 3),
        "padded_over_packed_range": [round(ratios[0], 3), round(ratios[-1], 3)],
        "padded_sorted_over_packed": round(statistics.median(sorted_ratios), 3),
        "padded_sorted_over_packed_range": [round(sorted_ratios[0], 3), round(sorted_ratios[-1], 3)],
        "ways": {
            name: {
                "real_share": round(shares[name], 4),
                "step_s": round(statistics.median(times), 4),
                "step_range_s": [round(min(times), 4), round(max(times), 4)],
                "cpu_s": round(statistics.median(cpu_seconds[name]), 4),
                "gradient_norm": round(norms[name], 5),
            }
            for name, times in seconds.items()
        },
    }


if __name__ == "__main__":
    main()
