"""What the divergences of ``distillation`` lose by seeing the teacher's k most likely tokens alone.

Teacher and student are tiny Qwen3 models with random weights and a large vocabulary; the student is the teacher with
noise on its weights. Logits are scaled until the teacher's mean entropy is the asked one, which says how many tokens
are likely. ``error`` is 1 − (value with k tokens) / (value over the whole vocabulary), which is not negative, because
the former is a lower bound; ``seen`` is the teacher's probability of its k tokens. Means over positions of random
sequences.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from machine import machine_facts
from torch import Tensor
from transformers import AutoModelForCausalLM

from chatlearn_hf.tiny import build_tiny_model
from chatlearn_losses import generalised_jsd

DIVERGENCES = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}
AIM = 0.05
"""Largest error of k = 512 at an entropy of 2 nats."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument(
        "--noise", type=float, default=0.03, help="of the weights, relative to their standard deviation"
    )
    parser.add_argument("--entropies", type=float, nargs="+", default=[0.5, 2.0, 4.0], help="nats")
    parser.add_argument("--top-k", type=int, nargs="+", default=[16, 64, 512, 4096])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        path = build_tiny_model(Path(directory), tie=False, vocab_size=arguments.vocabulary)
        teacher, student = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(2))
        for weight in student.parameters():
            weight += arguments.noise * weight.std() * torch.randn_like(weight)
        ids = torch.randint(0, arguments.vocabulary, (4, arguments.tokens // 4))
        logits = [model(input_ids=ids).logits.flatten(0, 1).double() for model in (teacher, student)]
    rows = [row for entropy in arguments.entropies for row in measured(*logits, entropy, arguments.top_k)]
    for row in rows:
        print(json.dumps(row))
    worst = max(
        (row["error"][name] for row in rows if row["entropy"] == 2.0 and row["top_k"] == 512 for name in DIVERGENCES),
        default=0.0,
    )
    facts = {"benchmark": "divergence_error", "settings": vars(arguments), "rows": rows, "met": worst <= AIM}
    print(json.dumps(facts | {"machine": machine_facts()}))


def measured(teacher: Tensor, student: Tensor, entropy: float, top_k: list[int]) -> list[dict[str, object]]:
    """One row for each k, at the scale of the logits at which the teacher has this mean entropy."""
    scale = scale_for(teacher, entropy)
    ours, theirs = (student * scale).log_softmax(-1), (teacher * scale).log_softmax(-1)
    whole = {name: float(generalised_jsd(ours, theirs, beta).mean()) for name, beta in DIVERGENCES.items()}
    rows: list[dict[str, object]] = []
    for k in top_k:
        likeliest = theirs.topk(k, dim=-1)
        chosen = ours.gather(-1, likeliest.indices)
        found = {name: generalised_jsd(chosen, likeliest.values, beta) for name, beta in DIVERGENCES.items()}
        values = {name: float(of_each.mean()) for name, of_each in found.items()}
        rows.append(
            {
                "entropy": entropy,
                "top_k": k,
                "seen": round(float(likeliest.values.exp().sum(-1).mean()), 4),
                "whole": {name: round(value, 5) for name, value in whole.items()},
                "error": {name: round(1 - values[name] / whole[name], 4) for name in DIVERGENCES},
            }
        )
    return rows


def scale_for(logits: Tensor, entropy: float) -> float:
    """By bisection: the entropy falls as logits grow."""
    low, high = 0.0, 1e3
    for _ in range(30):
        middle = (low + high) / 2
        logprobs = (logits[:64] * middle).log_softmax(-1)
        found = float(-(logprobs.exp() * logprobs).sum(-1).mean())
        low, high = (low, middle) if found < entropy else (middle, high)
    return (low + high) / 2


if __name__ == "__main__":
    main()
