"""One update of every algorithm on every trainer, from the same weights, batch and derived values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from trainer_parity import PP, SP, TP, Layout, batch_of, run_ranks

from chatlearn_core.executor.aggregations import select_aggregation
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import AlgorithmContext, ModelSource, RoleContext
from chatlearn_core.types import LogprobBasis, TrainBatch
from chatlearn_hf.tiny import build_tiny_model

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.05, "importance_correction": "truncate"},
    "dr_grpo": {},
    "dapo": {},
    "gspo": {},
    "cispo": {},
    "rloo": {},
    "reinforce_pp": {},
    "gdpo": {"rewards": {"right": 1.0, "short": 0.5}},
    "reinforce_pp_baseline": {},
    "maxrl": {},
    "ppo": {"whiten_advantages": True},
    "decoupled_ppo": {},
    "dpo": {},
    "ipo": {},
    "kto": {},
    "simpo": {},
    "orpo": {},
    "reward_model": {"margin_coef": 0.5, "centring_coef": 0.01},
    "distillation": {"divergence": "reverse_kl", "top_k": 4},
    "rejection_sampling": {"group_size": 4, "keep": 3},
    "sft": {},
}
"""Algorithm -> its options."""
UPDATES = [*((name, "trainer") for name in ALGORITHMS), ("ppo", "critic"), ("decoupled_ppo", "critic")]
"""Algorithm and role of every update."""
ONE_RANK = Layout("fsdp", "1 rank", 1, {})
LAYOUTS = [
    Layout("fsdp", "2 ranks", 2, {}),
    Layout("fsdp", "TP 2", 2, {"tensor_parallel": 2}),
    Layout("megatron", "PP 2", 2, {PP: 2}),
    Layout("megatron", "TP 2, SP", 2, {TP: 2, SP: True}),
    Layout("deepspeed", "ZeRO-3", 2, {"zero_stage": 3}),
]
ROLES = dict.fromkeys(("trainer", "reference", "critic", "teacher"), "trainer") | {
    "generator": "generator",
    "reward": "reward",
}
HEADS = {("reward_model", "trainer"): "reward", ("ppo", "critic"): "value", ("decoupled_ppo", "critic"): "value"}
"""Other updates are of a language model."""
TOP_K = 4
LEARNING_RATE = 8.0
"""Of plain SGD: so large that a change of the weights, over it, has the gradient's digits."""
LIKELY = -5.7
"""About the logprob of a token under the tiny model, whose 300 tokens are almost equally likely."""


def scored() -> TrainBatch:
    """Three groups of four with rewards, labels, ranks, and what the flows of the algorithms have computed."""
    batch, random = batch_of(), torch.Generator().manual_seed(11)
    likely = torch.rand(batch.num_tokens, TOP_K, generator=random).argsort(-1) + 30
    shares = torch.rand(batch.num_tokens, TOP_K, generator=random) / TOP_K
    tokens = {
        "critic_values": torch.randn(batch.num_tokens, generator=random),
        "teacher_topk_ids": likely,
        "teacher_topk_logprobs": shares.log(),
    }
    count = batch.num_sequences
    parts = {f"reward/{name}": torch.rand(count, generator=random, dtype=torch.float64) for name in ("right", "short")}
    mismatched = {  # completions of KTO under other prompts
        f"{role}_mismatched_logprobs": LIKELY * torch.rand(count, generator=random, dtype=torch.float64)
        for role in ("trainer", "reference")
    }
    return replace(batch, token_data=batch.token_data | tokens, sequence_data=batch.sequence_data | parts | mismatched)


def updates_of(registry: PluginRegistry, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the role of each update of an algorithm's first step, with its head, loss and batch."""
    record = registry.select("algorithm", name)
    context = AlgorithmContext(
        LogprobBasis(), 64, ROLES, LogprobBasis(), "the test's", aggregation=partial(select_aggregation, registry)
    )
    algorithm = registry.load_factory(record)(registry.load_options(record)(**ALGORITHMS[name]), context)
    batch = scored()
    derived = algorithm.advantages(batch, 1)
    kept = [index for index, sample in enumerate(batch.sample_ids) if sample not in derived.exclusions]
    assert len(kept) == (9 if name == "rejection_sampling" else 12)
    batch = replace(
        batch,
        token_data=batch.token_data | derived.token_data,
        sequence_data=batch.sequence_data | derived.sequence_data,
    ).select(kept)
    for update in algorithm.updates(1):
        head = HEADS.get((name, update.role), "lm")
        yield update.role, {"head": head, "loss": update.loss, "batch": update.loss.prepare(batch)}


def run(directory: Path) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Make every update in every layout; algorithm, role and layout's label -> answers of the ranks."""
    model = str(build_tiny_model(directory / "model", "qwen3", layers=4))
    registry = discover_plugins()
    work = {(name, role): job for name in ALGORITHMS for role, job in updates_of(registry, name)}
    assert sorted(work) == sorted(UPDATES)
    answers: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for trainer in ("fsdp", "megatron", "deepspeed"):
        jobs = {
            f"{name}-{role}-{number}": (name, role, layout)
            for name, role in work
            for number, layout in enumerate([ONE_RANK, *LAYOUTS])
            if layout.trainer == trainer
        }
        place = directory / trainer
        described = {
            job: {
                **work[name, role],
                "model": model,
                "trainer": trainer,
                "world": layout.world,
                "options": dict(layout.options),
            }
            for job, (name, role, layout) in jobs.items()
        }
        run_ranks(described, place, "algorithm_updates:rank_main")
        for job, (name, role, layout) in jobs.items():
            answers[name, role, layout.label] = [
                torch.load(place / f"{job}.{rank}.pt", weights_only=False) for rank in range(layout.world)
            ]
    return answers


def rank_main(number: str, folder: str) -> None:
    """The program of rank ``number``: every job of ``work.pt``, one after the other."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rank, directory = int(number), Path(folder)
    work = torch.load(directory / "work.pt", weights_only=False)
    registry = discover_plugins()
    for name, job in work["jobs"].items():
        if rank < job["world"]:
            torch.save(_update(registry, job, rank, directory / name), directory / f"{name}.{rank}.pt")


def _update(registry: PluginRegistry, job: Mapping[str, Any], rank: int, place: Path) -> dict[str, Any]:
    record, batch = registry.select("trainer", job["trainer"]), job["batch"]
    options = {"learning_rate": LEARNING_RATE, "optimizer": "sgd", "grad_clip": None, "max_tokens_per_micro_batch": 200}
    context = RoleContext(
        "trainer",
        ModelSource(job["model"], job["model"], head=job["head"]),
        rank=rank,
        world_size=job["world"],
        trainable=True,
        rendezvous=f"file://{place}.rendezvous" if job["world"] > 1 else None,
    )
    trainer = registry.load_factory(record)(registry.load_options(record)(**(options | job["options"])), context)
    trainer.setup()
    count, own = trainer.data_parallel_size, trainer.data_parallel_rank
    groups = batch.group_index.tolist()
    mine = batch.select([index for index, group in enumerate(groups) if group % count == own])
    before = {shard.name: shard.tensor.clone() for shard in trainer.weights()}
    metrics = {name: metric.total for name, metric in trainer.update(mine, job["loss"]).items()}
    gradients = {shard.name: (before[shard.name] - shard.tensor) / LEARNING_RATE for shard in trainer.weights()}
    trainer.close()
    return {"metrics": metrics, "gradients": gradients}
