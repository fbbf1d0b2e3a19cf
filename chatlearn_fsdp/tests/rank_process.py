"""One rank of trainers that need several, forked by the fixture ``run_jobs`` from a process that has this imported.

``work.pt`` in its directory lists jobs, which the process does one after the other. A rank takes part in a job that has
that many ranks, and leaves its answer in ``<job>.rank<r>.pt``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chatlearn_core.exceptions import BackendError
from chatlearn_core.plugins.records import Export
from chatlearn_core.protocols import LossOutput, ModelSource, RoleContext, WeightLoader
from chatlearn_core.types import Box, OutputRequest, Outputs, TrainBatch, WeightManifest, WeightShard
from chatlearn_fsdp.options import FSDPOptions
from chatlearn_fsdp.sharding import whole
from chatlearn_fsdp.trainer import FSDPTrainer
from chatlearn_hf.meta_start import CheckpointFiles
from chatlearn_trainer_kit.optimizer import optimizer_tensors


class HeadLoss:
    """-sum w (A logprob + 0.1 entropy), sum w (value - A)^2, or sum (score - target)^2."""

    unit = "sequence"

    def __init__(self, head: str, poison: str | None = None) -> None:
        names = {"lm": {"logprobs", "entropy"}, "value": {"values"}, "reward": {"scores"}}[head]
        self.needs = OutputRequest(frozenset(names), 0.7)
        self.head, self.poison = head, poison

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        return batch

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        weight, advantage = batch.token_data["loss_weight"], batch.token_data["advantages"]
        if self.head == "lm":
            total = -(weight * (advantage * outputs["logprobs"] + 0.1 * outputs["entropy"])).sum()
        elif self.head == "value":
            total = (weight * (outputs["values"] - advantage) ** 2).sum()
        else:
            total = ((outputs["scores"] - batch.sequence_data["target"]) ** 2).sum()
        return LossOutput(total * float("nan") if self.poison in batch.sample_ids else total)


class ReadingCount:
    """Counts the elements that a start reads from checkpoint files."""

    def __init__(self) -> None:
        self.elements = 0

    def __enter__(self) -> ReadingCount:
        self._box = CheckpointFiles.box

        def box(files: CheckpointFiles, name: str, box: Box) -> torch.Tensor:
            read = self._box(files, name, box)
            self.elements += read.numel()
            return read

        CheckpointFiles.box = box  # type: ignore[method-assign]  # counted, then put back
        return self

    def __exit__(self, *_: object) -> None:
        CheckpointFiles.box = self._box  # type: ignore[method-assign]  # as above


class Allocations(TorchDispatchMode):
    """Bytes of the memory that operations take beyond their arguments' own, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = set(_memory((args, kwargs)))
        made = func(*args, **(kwargs or {}))
        for memory, num_bytes in _memory(made).items():
            if memory not in given:
                self.num_bytes += num_bytes
                self.largest = max(self.largest, num_bytes)
        return made


class Communication(TorchDispatchMode):
    """Counts the collectives of FSDP by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


def _memory(values: Any) -> dict[int, int]:
    """The blocks of memory under all plain and sharded tensors of these values: where they are, and their bytes."""
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in tree_leaves(values)]
    plain = [t for t in tensors if type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type != "meta"]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in plain}


def streamed(trainer: FSDPTrainer, export: Export) -> tuple[int, int]:
    """Bytes that streaming takes beyond the weights, all of them and of the largest tensor."""
    with Allocations() as taken:
        for _ in trainer.weights(export):
            pass
    return taken.num_bytes, taken.largest


async def take(loader: WeightLoader, manifest: WeightManifest, sent: list[Any], boxes: bool) -> None:
    """One refresh, a tensor or box at a time. Every rank takes all of it, at its own pace."""
    await loader.begin(1, manifest)
    for name, shape, box, owner, tensor in sent:
        if boxes:
            await loader.load_boxes([WeightShard(name, shape, box, owner, tensor)])
        else:
            await loader.load_tensors([(name, tensor)])
    assert await loader.finish() == 1


def asked(loss: HeadLoss) -> OutputRequest:
    """What the loss needs; of a language model also tables of tokens."""
    names = loss.needs.names
    if loss.head == "lm":
        names |= {"topk_ids", "topk_logprobs", "logprobs_at"}
    return OutputRequest(names, 0.7, {"k": 3, "ids": "chosen"})


def do_job(job: dict[str, Any], rank: int, batch: TrainBatch) -> dict[str, Any]:
    """The job's keys are described at ``run_jobs``."""
    context = RoleContext(
        "trainer",
        ModelSource(job["model"], job["model"], head=job["head"]),
        rank=rank,
        world_size=job["world"],
        trainable=True,
        rendezvous=job["rendezvous"],
    )
    trainer = FSDPTrainer(FSDPOptions(**({"learning_rate": 1e-3, "grad_clip": None} | job["options"])), context)
    with ReadingCount() as read:
        trainer.setup()
    answer: dict[str, Any] = {"elements_read": read.elements}
    if job["load"]:
        trainer.load(Path(job["load"]))
    loss = job["loss"] or HeadLoss(job["head"], job["poison"])
    mine = (job["batch"] or batch).select(job["slices"][trainer.data_parallel_rank])
    if isinstance(loss, HeadLoss):
        answer["computed"] = trainer.compute(mine, asked(loss))
    try:
        for number in range(job["updates"]):
            with Communication() as communication:
                metrics = trainer.update(mine, loss)
            answer["communication"] = communication.calls
            answer["metrics"] = {name: metric.total for name, metric in metrics.items()}
            if number == 0 or number == job["updates"] - 1:
                answer["gradients"] = _gradients(trainer)
            if number == 0:
                answer["first"] = {"metrics": answer["metrics"], "gradients": answer["gradients"]}
    except BackendError as error:
        answer["error"] = str(error)
    if job["save"]:
        trainer.save(Path(job["save"]))
    if job["save_beside"]:
        trainer.begin_save(Path(job["save_beside"]))
        trainer.update(mine, loss)
        answer["written"] = trainer.finish_save()
    if job["export"]:
        trainer.export_model(Path(job["export"]))
        answer["computed_after"] = trainer.compute(mine, loss.needs)
    if job["take"]:
        sent = torch.load(job["take"]["file"], weights_only=False)
        loader = trainer.weight_loader(job["take"]["decay"])
        assert loader is not None
        trainer.compute(mine, loss.needs)  # which leaves the root's own parameters gathered
        answer["before"] = _full(trainer)
        with Allocations() as taken:
            asyncio.run(take(loader, trainer.manifest(), sent, job["take"]["boxes"]))
        answer["largest_taken"], answer["num_updates"] = taken.largest, trainer.num_updates
    if job["weights"]:
        trainer.compute(mine, loss.needs)  # FSDP leaves the root's own parameters gathered after it
        answer["live_bytes"] = trainer.live_bytes("weights")
        answer["full"] = _full(trainer)
        answer["taken"] = {export: streamed(trainer, export) for export in ("full_tensors", "boxes")}
        answer["boxes"] = [
            (shard.name, shard.global_shape, shard.box, shard.owner_rank, shard.tensor.clone())
            for shard in trainer.weights("boxes")
        ]
        trainer.offload(["weights", "optimizer"])
        answer["offloaded_bytes"] = trainer.live_bytes("weights") + trainer.live_bytes("optimizer")
        trainer.onload(["weights", "optimizer"])
        answer["again"] = _full(trainer)
    trainer.close()
    return answer


def _gradients(trainer: FSDPTrainer) -> dict[str, torch.Tensor]:
    """Gradients before clipping after one step, because AdamW starts from 0; a moving average after several."""
    assert trainer._optimizer is not None
    assert trainer._model is not None
    moments = optimizer_tensors(trainer._optimizer, trainer._model.model)
    factor = 1 - trainer.options.adam_beta1
    return {name: whole(entry["exp_avg"]).cpu() / factor for name, entry in moments.items()}


def _full(trainer: FSDPTrainer) -> dict[str, torch.Tensor]:
    return {shard.name: shard.tensor.clone() for shard in trainer.weights()}


def main(number: str, folder: str) -> None:
    """The program of rank ``number``."""
    rank, directory = int(number), Path(folder)
    torch.set_num_threads(1)
    work = torch.load(directory / "work.pt", weights_only=False)
    for name, job in work["jobs"].items():
        if rank < job["world"]:
            answer = do_job(job, rank, work["batch"])
            torch.save(answer, directory / f"{name}.rank{rank}.pt")
