"""Five updates of every trainer in every layout of ranks, compared with plain transformers on one process.

The reference runs each sequence alone through transformers, in float32, and takes its steps by hand. A trainer gets
the same model, the same batch (uneven lengths, equal prompts) and the same loss. Differences become the table in
``docs/trainer-parity.md``.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from chatlearn_core.executor.aggregations import select_aggregation
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import AlgorithmContext, Loss, ModelSource, RoleContext
from chatlearn_core.types import LogprobBasis, OutputRequest, TrainBatch, cumulative_lengths
from chatlearn_hf.checkpoint_names import checkpoint_layout, checkpoint_tensors
from chatlearn_hf.heads import load_model
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_hosting.fork_server import ForkServer

DOCUMENT = Path(__file__).parents[2] / "docs" / "trainer-parity.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
UPDATES = 5
LEARNING_RATE = 0.5
DEADLINE_S = 900.0
LOSSES: dict[str, tuple[dict[str, Any], int]] = {
    "grpo": ({"kl_coef": 0.05}, 200),
    "sft": ({}, 1),
    "dpo": ({}, 120),
}
"""Algorithm -> its options, and the token budget of a micro-batch: several packed units, one unit, or two."""
MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe")
TP, PP, SP, EP = "tensor_parallel", "pipeline_parallel", "sequence_parallel", "expert_parallel"
TOLERANCES = {"logprobs": 1e-4, "loss": 1e-4, "norm": 1e-4, "gradients": 1e-4, "weights": 1e-4}
"""Largest differences: absolute for logprobs (nats), the loss and weights, relative for norm and gradients."""


@dataclass(slots=True, frozen=True)
class Layout:
    """A trainer and how its ranks share the work."""

    trainer: str
    name: str
    world: int
    options: Mapping[str, Any]

    @property
    def label(self) -> str:
        return f"{self.trainer}, {self.name}"


def layouts(model: str) -> list[Layout]:
    """Return every layout for a model."""
    moe = model == "qwen3_moe"
    split = {TP: 2, SP: True} if moe else {TP: 2}  # Megatron-Core needs sequence parallelism beside experts
    found = [
        Layout("fsdp", "1 rank", 1, {}),
        Layout("fsdp", "2 ranks", 2, {}),
        Layout("fsdp", "HSDP 2x2", 4, {"dp_replicate": 2}),
        Layout("fsdp", "Ulysses 2", 2, {"ulysses": 2}),
        Layout("fsdp", "ring 2", 2, {"ring": 2}),
        Layout("megatron", "1 rank", 1, {}),
        Layout("megatron", "recompute", 1, {"gradient_checkpointing": True}),
        Layout("megatron", "DP 2", 2, {}),
        Layout("megatron", "CP 2", 2, {"context_parallel": 2}),
        Layout("megatron", "PP 2", 2, {PP: 2}),
        Layout("megatron", "PP 2, VPP 2", 2, {PP: 2, "virtual_pipeline": 2}),
        Layout("megatron", "TP 2, SP", 2, {TP: 2, SP: True}),
        Layout("megatron", "TP 2 x PP 2" + (", SP" if moe else ""), 4, split | {PP: 2}),
        Layout("deepspeed", "ZeRO-1", 2, {"zero_stage": 1}),
        Layout("deepspeed", "ZeRO-2", 2, {"zero_stage": 2}),
        Layout("deepspeed", "ZeRO-3", 2, {"zero_stage": 3}),
    ]
    if moe:
        found += [
            Layout("megatron", "EP 2", 2, {EP: 2}),
            Layout("megatron", "TP 2, SP x EP 2", 4, {TP: 2, SP: True, EP: 2}),
        ]
    else:
        found += [
            Layout("fsdp", "TP 2", 2, {TP: 2}),
            Layout("fsdp", "DP 2 x TP 2", 4, {TP: 2}),
            Layout("fsdp", "HSDP 2 x TP 2", 4, {TP: 2, "dp_replicate": 2}),
            Layout("megatron", "TP 2", 2, {TP: 2}),
        ]
    return found


@dataclass(slots=True)
class Outcome:
    """What five updates did."""

    logprobs: torch.Tensor
    """[T] before the first update."""
    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    """Of the first update, by checkpoint name."""
    weights: dict[str, torch.Tensor]
    """After the last update."""


def batch_of() -> TrainBatch:
    """Three groups of four with equal prompts, completions of uneven lengths, rewards, and likely logprobs."""
    random, prompts, per_group = torch.Generator().manual_seed(11), [20, 9, 30], 4
    lengths = [prompts[i % 3] + 3 + 5 * (i % 4) for i in range(3 * per_group)]
    bounds = cumulative_lengths(lengths)
    total, count = sum(lengths), len(lengths)
    mask = torch.rand(total, generator=random) < 0.8
    tokens = torch.randint(0, 300, (total,), generator=random)
    starts = bounds.tolist()
    for i, start in enumerate(starts[:-1]):
        prompt = prompts[i % 3]
        tokens[start : start + prompt] = tokens[starts[i % 3] : starts[i % 3] + prompt]
        mask[start : start + prompt] = False
    groups = torch.arange(count) % 3
    near = {
        name: torch.where(mask, -5.7 + 0.1 * torch.randn(total, generator=random), 0.0)
        for name in ("trainer_logprobs", "reference_logprobs", "generator_logprobs")
    }
    rewards = torch.rand(count, generator=random, dtype=torch.float64)
    return TrainBatch(
        sample_ids=tuple(f"s{i}" for i in range(count)),
        token_ids=tokens,
        cu_seqlens=bounds,
        loss_mask=mask,
        unit_index=groups,
        group_index=groups,
        token_data=near,
        sequence_data={"reward": rewards, "rank": rewards, "label": (rewards > 0.5).double()},
    )


def prepared(registry: PluginRegistry, name: str) -> tuple[Loss, TrainBatch]:
    """Return an algorithm's loss for its policy, and the batch as the loss takes it."""
    record = registry.select("algorithm", name)
    roles = {"trainer": "trainer", "reference": "trainer", "generator": "generator", "reward": "reward"}
    context = AlgorithmContext(
        LogprobBasis(), 64, roles, LogprobBasis(), "the test's", aggregation=partial(select_aggregation, registry)
    )
    algorithm = registry.load_factory(record)(registry.load_options(record)(**LOSSES[name][0]), context)
    batch = batch_of()
    derived = algorithm.advantages(batch, 1)
    batch = replace(
        batch,
        token_data=batch.token_data | derived.token_data,
        sequence_data=batch.sequence_data | derived.sequence_data,
    )
    [update] = algorithm.updates(1)
    return update.loss, update.loss.prepare(batch)


def plain(path: str, loss: Loss, batch: TrainBatch) -> Outcome:
    """Take the updates with transformers and SGD written out."""
    model: PreTrainedModel = load_model(path, attention="eager")
    layout = checkpoint_layout(model)
    outcome = Outcome(_plain_outputs(model, loss, batch)["logprobs"].detach(), [], [], {}, {})
    for number in range(UPDATES):
        model.zero_grad(set_to_none=False)
        result = loss(_plain_outputs(model, loss, batch), batch)
        result.total.backward()
        outcome.losses.append(float(result.total))
        outcome.norms.append(
            math.sqrt(sum(float(p.grad.norm()) ** 2 for p in model.parameters() if p.grad is not None))
        )
        if number == 0:
            outcome.gradients = _named(model, layout, gradients=True)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
    outcome.weights = _named(model, layout, gradients=False)
    return outcome


def _plain_outputs(model: PreTrainedModel, loss: Loss, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Logprobs and entropies [T] of the masked tokens, each sequence alone."""
    found: dict[str, list[torch.Tensor]] = {"logprobs": [], "entropy": []}
    for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
        tokens, masked = batch.token_ids[start:stop], batch.loss_mask[start:stop]
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        rows, first = (logits / loss.needs.temperature).log_softmax(-1), logits.new_zeros(1)
        chosen = torch.cat([first, rows.gather(-1, tokens[1:, None]).squeeze(-1)])
        entropy = torch.cat([first, -(rows.exp() * rows).sum(-1)])
        found["logprobs"].append(torch.where(masked, chosen, 0.0))
        found["entropy"].append(torch.where(masked, entropy, 0.0))
    return {name: torch.cat(parts) for name, parts in found.items()}


def _named(model: PreTrainedModel, layout: Any, *, gradients: bool) -> dict[str, torch.Tensor]:
    """Return the weights, or their gradients, by checkpoint name."""
    kept = {name: parameter.data for name, parameter in model.named_parameters()}
    if gradients:
        for parameter in model.parameters():
            parameter.data = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    named = {name: tensor.clone() for name, tensor in checkpoint_tensors(model, layout)}
    for name, parameter in model.named_parameters():
        parameter.data = kept[name]
    return named


def rank_main(number: str, folder: str) -> None:
    """The program of rank ``number``: every job of ``work.pt``, one after the other."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rank, directory = int(number), Path(folder)
    work = torch.load(directory / "work.pt", weights_only=False)
    registry = discover_plugins()
    for name, job in work["jobs"].items():
        if rank < job["world"]:
            torch.save(_updates(registry, job, rank, directory / name), directory / f"{name}.{rank}.pt")


def _updates(registry: PluginRegistry, job: dict[str, Any], rank: int, place: Path) -> dict[str, Any]:
    record = registry.select("trainer", job["trainer"])
    loss, batch = prepared(registry, job["loss"])
    options = {
        "learning_rate": LEARNING_RATE,
        "optimizer": "sgd",
        "grad_clip": None,
        "max_tokens_per_micro_batch": LOSSES[job["loss"]][1],
    }
    context = RoleContext(
        "trainer",
        ModelSource(job["model"], job["model"]),
        rank=rank,
        world_size=job["world"],
        trainable=True,
        rendezvous=f"file://{place}.rendezvous" if job["world"] > 1 else None,
    )
    trainer = registry.load_factory(record)(registry.load_options(record)(**(options | job["options"])), context)
    trainer.setup()
    # Groups stay together; with more ranks than groups, one rank has none.
    own = [
        i
        for i, group in enumerate(batch.group_index.tolist())
        if group % trainer.data_parallel_size == trainer.data_parallel_rank
    ]
    mine = batch.select(own)
    before = {shard.name: shard.tensor.clone() for shard in trainer.weights()}
    computed = trainer.compute(mine, OutputRequest(frozenset({"logprobs"}), loss.needs.temperature))["logprobs"]
    metrics: list[dict[str, float]] = []
    first: dict[str, torch.Tensor] = {}
    for step in range(UPDATES):
        metrics.append({name: metric.total for name, metric in trainer.update(mine, loss).items()})
        if step == 0:
            first = {shard.name: (before[shard.name] - shard.tensor) / LEARNING_RATE for shard in trainer.weights()}
    after = {shard.name: shard.tensor.clone() for shard in trainer.weights()}
    trainer.close()
    return {"own": own, "logprobs": computed, "metrics": metrics, "gradients": first, "weights": after}


def run(model: str, directory: Path) -> Iterator[tuple[Layout, dict[str, float]]]:
    """Yield each layout of a model with its largest differences over all losses, as in ``TOLERANCES``."""
    torch.set_num_threads(1)
    path = str(build_tiny_model(directory / model, model, layers=4))  # type: ignore[arg-type]
    registry = discover_plugins()
    expected = {name: plain(path, *prepared(registry, name)) for name in LOSSES}
    by_trainer = {
        trainer: [one for one in layouts(model) if one.trainer == trainer]
        for trainer in ("fsdp", "megatron", "deepspeed")
    }
    for trainer, group in by_trainer.items():
        jobs = {
            f"{number}-{loss}": {
                "trainer": trainer,
                "world": one.world,
                "options": dict(one.options),
                "model": path,
                "loss": loss,
            }
            for number, one in enumerate(group)
            for loss in LOSSES
        }
        place = directory / f"{model}-{trainer}"
        run_ranks(jobs, place, "trainer_parity:rank_main")
        for number, one in enumerate(group):
            worst: dict[str, float] = {}
            for loss, reference in expected.items():
                found = _differences(reference, _joined(place, f"{number}-{loss}", one.world))
                worst = {name: max(worst.get(name, 0.0), value) for name, value in found.items()}
            yield one, worst


def run_ranks(jobs: Mapping[str, Mapping[str, Any]], directory: Path, program: str) -> None:
    """Do jobs on ranks, each forked to run ``program``, a ``module:function`` of this folder; ``world`` of a job says
    how many take part.
    """
    directory.mkdir(parents=True)
    torch.save({"jobs": dict(jobs)}, directory / "work.pt")
    with ForkServer(program.partition(":")[0], path=[str(Path(__file__).parent)]) as server:
        ranks = [
            server.start(program, str(rank), str(directory))
            for rank in range(max(job["world"] for job in jobs.values()))
        ]
        deadline = time.monotonic() + DEADLINE_S
        # A rank that died leaves the others waiting for it, so the first to fail ends it.
        while any(rank.poll() is None for rank in ranks) and not any(rank.returncode for rank in ranks):
            assert time.monotonic() < deadline, f"the ranks in {directory} did not finish in {DEADLINE_S:g} s"
            time.sleep(0.1)
        failed = [number for number, rank in enumerate(ranks) if rank.returncode]
        assert not failed, f"ranks {failed} failed in {directory}; their errors are above"


def _joined(directory: Path, job: str, world: int) -> Outcome:
    """Put the answers of all ranks together."""
    ranks = [torch.load(directory / f"{job}.{rank}.pt", weights_only=False) for rank in range(world)]
    batch = batch_of()
    bounds = batch.cu_seqlens.tolist()
    logprobs = torch.full((batch.num_tokens,), math.nan)
    for rank in ranks:
        at = 0
        for i in rank["own"]:
            size = bounds[i + 1] - bounds[i]
            logprobs[bounds[i] : bounds[i + 1]] = rank["logprobs"][at : at + size]
            at += size
    steps = range(UPDATES)
    norms = [
        [rank["metrics"][step]["grad_norm"] for rank in ranks if "grad_norm" in rank["metrics"][step]] for step in steps
    ]
    assert all(len(found) == 1 for found in norms), "one rank reports the gradient norm"
    return Outcome(
        logprobs,
        [sum(rank["metrics"][step].get("loss", 0.0) for rank in ranks) for step in steps],
        [norm for [norm] in norms],
        ranks[0]["gradients"],
        ranks[0]["weights"],
    )


def _differences(expected: Outcome, found: Outcome) -> dict[str, float]:
    scale = max(float(gradient.norm()) for gradient in expected.gradients.values())
    return {
        "logprobs": float((found.logprobs - expected.logprobs).abs().max()),
        "loss": max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)),
        "norm": max(abs(a / b - 1) for a, b in zip(found.norms, expected.norms, strict=True)),
        # A gradient that is much smaller than the largest is below the rounding of the weights it is measured by.
        "gradients": max(
            float((found.gradients[name] - gradient).norm()) / max(float(gradient.norm()), 1e-2 * scale)
            for name, gradient in expected.gradients.items()
        ),
        "weights": max(float((found.weights[name] - weight).abs().max()) for name, weight in expected.weights.items()),
    }


def write_table(rows: Mapping[str, list[tuple[Layout, dict[str, float]]]], commit: str, date: str) -> None:
    """Replace the table in the document."""
    engines = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "megatron-core", "deepspeed")
    )
    lines = [f"Run on {date} at commit {commit}, CPU, float32, {engines}.\n\n"]
    for model, found in rows.items():
        columns = ["trainer", "layout", "ranks", *TOLERANCES]
        lines.append(f"## {model}\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n")
        for one, worst in found:
            cells = " | ".join(f"{worst[name]:.0e}" for name in TOLERANCES)
            lines.append(f"| {one.trainer} | {one.name} | {one.world} | {cells} |\n")
        lines.append("\n")
    text = DOCUMENT.read_text(encoding="utf-8")
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    DOCUMENT.write_text(text[:start] + "".join(lines) + text[stop:], encoding="utf-8")
