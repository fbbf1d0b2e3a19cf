"""Time and peak memory of a GRPO loss and its gradients from hidden states, by sequence length and vocabulary.

Aim: at the largest size the loss needs at most a tenth of the memory of the whole logits, which it never holds. The
last hidden states and the head's weight are given; the step computes the logprobs of one packed row, the policy loss
and the gradients of states and weight, with the entropy as a metric, in four ways:

- chatlearn: the head in chunks, recomputed in the backward pass (``token_logprobs_from_hidden``), chunks as trainers
  choose them;
- naive: all logits, ``log_softmax``, ``gather``;
- trl: TRL's fused head (``ChunkedLogProbFunction``) in tiles of tokens and vocabulary;
- trl_logits: all logits, TRL's ``selective_log_softmax`` and ``entropy_from_logits``.

All start from the same numbers and must arrive at the same loss and gradients. Each has a process of its own, whose
peak is what its resident set (or the GPU's memory) rose by. What would not fit into ``--memory-gib`` is left out.
chatlearn's peak does not grow with the tokens: it is that of one chunk's backward pass (``expected_peak``), so that its
part in the logits' memory falls with the length.
Advantages are timed on the same lengths: GAE in one pass over packed sequences against the loop over padded columns.

    python benchmarks/loss_memory.py [--tokens 1024 4096] [--vocabulary 32000 151936] [--hidden 64] [--quick]

Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from machine import installed_version, machine_facts
from process_costs import Costs
from torch import Tensor

from chatlearn_algorithms.policy_loss import PolicyLoss
from chatlearn_core.types import TrainBatch, cumulative_lengths
from chatlearn_losses import gae, token_logprobs_from_hidden
from chatlearn_losses.logprobs import default_chunk_tokens, softmax_tokens

AIM = 0.1
SEED = 5
SEQUENCE_TOKENS = 1024
"""Sequences of the packed row; the last is shorter."""
TRL_CHUNK = 32768
"""Columns of the vocabulary in a tile of TRL's fused head; its trainers' number."""
TOLERANCE = 1e-4
"""Relative; float32 sums over other orders."""
WARM_UP_TOKENS, WARM_UP_VOCABULARY = 80, 1 << 19
"""More than one chunk, so that what recomputing imports is not measured."""
COPIES = {"chatlearn": 0.0, "trl": 1.7, "naive": 4.0, "trl_logits": 4.0}
"""Tensors of [tokens, vocabulary] in float32 that a way holds at once at least; decides only what is left out."""
GIB = 1 << 30

Scored = tuple[Tensor, Tensor]
"""[T] logprobs with gradient, and [T] entropies."""
Way = Callable[[Tensor, Tensor, Tensor], Scored]


def chatlearn(hidden: Tensor, weight: Tensor, labels: Tensor) -> Scored:
    """Chunks as ``PackedModel`` chooses them."""
    chunk = default_chunk_tokens(len(weight), weight.device)
    scored = token_logprobs_from_hidden(
        hidden, weight, labels, chunk_tokens=chunk, with_entropy=True, recompute=len(hidden) > chunk
    )
    assert scored.entropy is not None, "it was asked for"
    return scored.logprobs, scored.entropy


def naive(hidden: Tensor, weight: Tensor, labels: Tensor) -> Scored:
    """Everything at once, the entropy without gradient."""
    distribution = (hidden @ weight.T).log_softmax(-1)
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(-1, labels[:, None]).squeeze(-1), entropy


def trl(hidden: Tensor, weight: Tensor, labels: Tensor) -> Scored:
    """TRL's fused head, as its trainers call it."""
    from trl.kernels import ChunkedLogProbFunction

    logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
        hidden, weight, None, labels, 1.0, TRL_CHUNK, None, 1.0, ("log_probs", "entropy")
    )
    return logprobs, entropy


def trl_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Scored:
    """TRL's functions of whole logits."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    logits = hidden @ weight.T
    with torch.no_grad():
        entropy = entropy_from_logits(logits)
    return selective_log_softmax(logits, labels), entropy


WAYS: dict[str, Way] = {"chatlearn": chatlearn, "naive": naive, "trl": trl, "trl_logits": trl_logits}


def sequence_lengths(tokens: int) -> list[int]:
    """Of the packed row."""
    whole, rest = divmod(tokens, SEQUENCE_TOKENS)
    return [SEQUENCE_TOKENS] * whole + [rest] * bool(rest)


def grpo_batch(tokens: int, old: Tensor) -> TrainBatch:
    """One packed row on the CPU, all of it learned, with alternating advantages."""
    lengths = sequence_lengths(tokens)
    index = torch.arange(len(lengths))
    signs = torch.cat([torch.full((length,), 1.0 if i % 2 else -1.0) for i, length in enumerate(lengths)])
    return TrainBatch(
        sample_ids=tuple(f"s{i}" for i in index.tolist()),
        token_ids=torch.arange(tokens),
        cu_seqlens=cumulative_lengths(lengths),
        loss_mask=torch.ones(tokens, dtype=torch.bool),
        unit_index=index,
        group_index=index,
        token_data={"advantages": signs, "trainer_logprobs": old},
    )


def one_step(way: Way, tokens: int, vocabulary: int, width: int, device: str) -> Callable[[], dict[str, float]]:
    """A step from logprobs to gradients; the same numbers in every process."""
    generator = torch.Generator().manual_seed(SEED)
    hidden = torch.randn(tokens, width, generator=generator).to(device).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) / math.sqrt(width)).to(device).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator).to(device)
    loss = PolicyLoss(aggregation="token_mean")
    old = torch.full((tokens,), -math.log(vocabulary))

    def step() -> dict[str, float]:
        hidden.grad = weight.grad = None
        logprobs, entropy = way(hidden, weight, labels)
        batch = loss.prepare(grpo_batch(tokens, old.clamp(max=0.0))).to(device)
        result = loss({"logprobs": logprobs, "entropy": entropy}, batch)
        result.total.backward()
        assert hidden.grad is not None, "backward filled it"
        assert weight.grad is not None, "backward filled it"
        return {
            "loss": result.total.item(),
            "entropy": entropy.detach().mean().item(),
            "hidden_gradient_norm": hidden.grad.norm().item(),
            "weight_gradient_norm": weight.grad.norm().item(),
        }

    return step


def measure_way(
    name: str, tokens: int, vocabulary: int, width: int, device: str, repeats: int, warm_up: bool
) -> dict[str, Any]:
    """Seconds and the peak of one way at one size; runs in a process of its own."""
    if warm_up:
        one_step(WAYS[name], WARM_UP_TOKENS, WARM_UP_VOCABULARY, width, device)()  # imports and threads
    step = one_step(WAYS[name], tokens, vocabulary, width, device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    costs = Costs(alone=True)
    numbers, seconds = {}, []
    for _ in range(repeats):
        start = time.perf_counter()
        numbers = step()
        seconds.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() - held) / (1 << 20) if device == "cuda" else costs.peak_mb()
    return {
        "seconds": statistics.median(seconds),
        "seconds_range": [min(seconds), max(seconds)],
        "cpu_s": costs.cpu_s() / repeats,
        "peak_extra_mib": round(peak, 1),
        "numbers": numbers,
    }


def run_apart(name: str, tokens: int, vocabulary: int, args: argparse.Namespace) -> dict[str, Any]:
    """``measure_way`` in a new process."""
    command = [sys.executable, __file__, "--way", name, "--tokens", str(tokens), "--vocabulary", str(vocabulary)]
    command += ["--hidden", str(args.hidden), "--device", args.device, "--repeats", str(args.repeats)]
    command += ["--threads", str(args.threads), *(["--quick"] if args.quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=args.timeout_s)
    if done.returncode:
        raise RuntimeError(f"{name} with {tokens} tokens and {vocabulary} entries failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def expected_peak(tokens: int, vocabulary: int, width: int, device: torch.device) -> dict[str, float]:
    """MiB that chatlearn holds at once in the backward pass of a chunk, without tensors of one number per token."""
    chunk = min(tokens, default_chunk_tokens(vocabulary, device)) * vocabulary
    elements = {
        "chunk_logits": chunk,
        "chunk_logits_gradient": chunk,
        "softmax_of_part": min(chunk, softmax_tokens(vocabulary, device) * vocabulary),
        "weight_gradient": vocabulary * width,
        "weight_gradient_of_chunk": vocabulary * width,
    }
    found = {name: round(4 * number / (1 << 20), 1) for name, number in elements.items()}
    return found | {"sum": round(sum(found.values()), 1)}


def measure_size(tokens: int, vocabulary: int, args: argparse.Namespace) -> dict[str, Any]:
    """All ways at one size, checked against each other."""
    logits_mib = tokens * vocabulary * 4 / (1 << 20)
    ways: dict[str, Any] = {}
    for name in ("chatlearn", *(name for name in args.ways if name != "chatlearn")):
        if name.startswith("trl") and installed_version("trl") is None:
            ways[name] = {"left_out": "TRL is not installed (requirements/dev.txt)"}
            continue
        if args.quick and name == "trl_logits":
            ways[name] = {"left_out": "--quick imports TRL once"}
            continue
        needed = COPIES[name] * logits_mib / 1024
        if needed > args.memory_gib:
            ways[name] = {"left_out": f"needs at least {needed:.1f} GiB, --memory-gib is {args.memory_gib}"}
            continue
        ways[name] = run_apart(name, tokens, vocabulary, args)
        print(f"{tokens} x {vocabulary}, {name}: {ways[name]}", file=sys.stderr)
    expected = ways["chatlearn"]["numbers"]
    for name, way in ways.items():
        for key, value in way.get("numbers", {}).items():
            if not math.isclose(value, expected[key], rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                raise RuntimeError(f"{key} is {value} in {name} and {expected[key]} in chatlearn: not the same work")
    peak = ways["chatlearn"]["peak_extra_mib"]
    return {
        "tokens": tokens,
        "vocabulary": vocabulary,
        "logits_mib": round(logits_mib, 1),
        "peak_over_logits": round(peak / logits_mib, 3),
        "expected_peak_mib": expected_peak(tokens, vocabulary, args.hidden, torch.device(args.device)),
        "ways": ways,
    }


def padded_gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """[S, L] advantages by the textbook's recursion over columns, from the last."""
    last, advantages = torch.zeros(len(rewards)), torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        following = values[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros(len(rewards))
        last = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * last
        advantages[:, t] = last
    return advantages


def measure_advantages(tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds of GAE on a packed row of equal sequences, and by the loop."""
    tokens = max(SEQUENCE_TOKENS, tokens // SEQUENCE_TOKENS * SEQUENCE_TOKENS)
    generator = torch.Generator().manual_seed(SEED)
    rewards, values = torch.randn(2, tokens, generator=generator)
    batch = grpo_batch(tokens, torch.zeros(tokens))
    shape = (-1, SEQUENCE_TOKENS)
    ways: dict[str, Callable[[], Tensor]] = {
        "chatlearn": lambda: gae(rewards, values, batch, gamma=0.99, lam=0.95).advantages,
        "padded_loop": lambda: padded_gae(rewards.reshape(shape), values.reshape(shape), 0.99, 0.95).reshape(-1),
    }
    expected = ways["padded_loop"]()
    found: dict[str, Any] = {"tokens": tokens}
    for name, way in ways.items():
        torch.testing.assert_close(way().to(expected), expected, rtol=1e-4, atol=1e-4)
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - start)
        found[f"{name}_s"] = statistics.median(seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 32768])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32000, 151936])
    parser.add_argument("--hidden", type=int, default=64, help="width of the hidden states")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--memory-gib", type=float, default=8.0, help="of the ways that hold all logits")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="of one way at one size")
    parser.add_argument("--ways", nargs="+", choices=sorted(WAYS), default=list(WAYS), help="chatlearn always runs")
    parser.add_argument("--way", choices=sorted(WAYS), help="only this one, in this process")
    parser.add_argument("--quick", action="store_true", help="next to nothing, to see that it works")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.way:
        [tokens], [vocabulary] = args.tokens, args.vocabulary
        sizes = (tokens, vocabulary, args.hidden, args.device, args.repeats)
        print(json.dumps(measure_way(args.way, *sizes, warm_up=not args.quick)))
        return
    if args.quick:
        args.tokens, args.vocabulary, args.hidden = [1024], [40000], 16  # more than one chunk of logits
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    rows = [measure_size(tokens, size, args) for tokens in args.tokens for size in args.vocabulary]
    largest = max(rows, key=lambda row: row["logits_mib"])
    print(
        json.dumps(
            {
                "benchmark": "loss_memory",
                "peak_over_logits": largest["peak_over_logits"],
                "aim": AIM,
                "met": largest["peak_over_logits"] <= AIM,
                "quick": args.quick,
                "hidden": args.hidden,
                "device": args.device,
                "rows": rows,
                "advantages": [measure_advantages(tokens, max(args.repeats, 3)) for tokens in args.tokens],
                "trl": installed_version("trl"),
                "machine": machine_facts(),
            }
        )
    )


if __name__ == "__main__":
    main()
