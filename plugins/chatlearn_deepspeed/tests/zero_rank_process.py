"""One rank of trainers, forked by the fixture ``run_jobs`` from a process that has this imported.

``work.pt`` in its directory lists jobs, which the process does one after the other. A rank takes part in a job that has
that many ranks, and leaves its answer in ``<job>.rank<r>.pt``.
"""

from __future__ import annotations

import asyncio
import faulthandler
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  # imported before the fork, once for all ranks
import torch

from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols import LossOutput, ModelSource, RoleContext
from chatlearn_core.types import OutputRequest, Outputs, TrainBatch, WeightShard
from chatlearn_deepspeed.options import DeepSpeedOptions
from chatlearn_deepspeed.trainer import DeepSpeedTrainer
from chatlearn_deepspeed.weight_stream import whole_tensors

JOB_DEADLINE_S = 120.0
"""Far more than a job takes; its stack is printed then, as ranks that wait for each other do so for half an hour."""
ALL_SHARDED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""ZeRO-3 keeps parameters of fewer elements whole on every rank; tiny models have no others."""


class HeadLoss:
    """-sum w (A logprob + 0.1 entropy), or sum w (value - A)^2."""

    unit = "sequence"

    def __init__(self, head: str, poison: str | None = None) -> None:
        self.needs = OutputRequest(frozenset({"logprobs", "entropy"} if head == "lm" else {"values"}), 0.7)
        self.head, self.poison = head, poison

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        return batch

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        weight, advantage = batch.token_data["loss_weight"], batch.token_data["advantages"]
        if self.head == "lm":
            total = -(weight * (advantage * outputs["logprobs"] + 0.1 * outputs["entropy"])).sum()
        else:
            total = (weight * (outputs["values"] - advantage) ** 2).sum()
        return LossOutput(total * float("nan") if self.poison in batch.sample_ids else total)


def weights_of(trainer: DeepSpeedTrainer) -> dict[str, torch.Tensor]:
    return {shard.name: shard.tensor.clone() for shard in trainer.weights()}


def first_moments(trainer: DeepSpeedTrainer) -> list[tuple[str, tuple[int, ...], int, torch.Tensor]]:
    """Name, whole shape, start and values of this rank's part of the first moment."""
    zero = trainer._sharded()
    return [
        (name, fragment.shape, fragment.start, next(iter(fragment.moments.values())).clone())
        for name, fragment in zero.fragments().items()
        if fragment.moments
    ]


def largest_gathered(trainer: DeepSpeedTrainer, bucket_bytes: int) -> int:
    """Bytes of parameters that are whole at once while they are exported."""
    zero, most = trainer._sharded(), 0
    for _ in whole_tensors(zero, trainer._checkpoint_layout(), bucket_bytes):
        most = max(most, sum(parameter.data.nbytes for parameter in zero.packed.parameters()))
    return most


def boxes_of(trainer: DeepSpeedTrainer) -> tuple[list[Any], int]:
    """This rank's boxes, and the largest number of bytes of parameters that were whole meanwhile."""
    zero, found, most = trainer._sharded(), [], 0
    for shard in trainer.weights("boxes"):
        most = max(most, sum(parameter.data.nbytes for parameter in zero.packed.parameters()))
        found.append((shard.name, shard.global_shape, shard.box, shard.tensor.clone()))
    return found, most


async def take(trainer: DeepSpeedTrainer, decay: float, boxes: bool) -> None:
    """One refresh with 2 x the trainer's own weights, a half of each tensor's rows at a time if ``boxes``."""
    sent = {name: 2 * tensor for name, tensor in weights_of(trainer).items()}
    loader = trainer.weight_loader(decay)
    assert loader is not None
    await loader.begin(1, trainer.manifest())
    for name, tensor in sent.items():
        if not boxes:
            await loader.load_tensors([(name, tensor)])
            continue
        shape, half = tuple(tensor.shape), len(tensor) // 2
        for rows in ((0, half), (half, len(tensor))):
            box = (rows, *((0, size) for size in shape[1:]))
            await loader.load_boxes([WeightShard(name, shape, box, 0, tensor[slice(*rows)])])
    assert await loader.finish() == 1


def do_job(job: dict[str, Any], rank: int, batch: TrainBatch) -> dict[str, Any]:
    """The job's keys are described at ``run_jobs``."""
    context = RoleContext(
        "trainer",
        ModelSource(job["model"], job["model"], head=job["head"]),
        rank=rank,
        world_size=job["world"],
        trainable=job["trainable"],
        rendezvous=job["rendezvous"],
        engine_arguments=ALL_SHARDED,
    )
    trainer = DeepSpeedTrainer(DeepSpeedOptions(**job["options"]), context)
    trainer.setup()
    answer: dict[str, Any] = {"metrics": []}
    if job["load"]:
        trainer.load(Path(job["load"]))
    loss = HeadLoss(job["head"], job["poison"])
    mine = batch.select(job["slices"][trainer.data_parallel_rank])
    answer["computed"] = trainer.compute(mine, loss.needs)
    for update in range(job["updates"]):
        try:
            metrics = trainer.update(mine, loss)
        except BackendError as error:
            answer["error"], answer["refused"] = str(error), weights_of(trainer)
            loss = HeadLoss(job["head"])
            metrics = trainer.update(mine, loss)
        answer["metrics"].append({name: metric.total for name, metric in metrics.items()})
        if update == 0:
            answer["first_moments"] = first_moments(trainer)
    if job["save"]:
        trainer.save(Path(job["save"]))
    if job["export"]:
        trainer.export_model(Path(job["export"]))
    answer["weights"] = weights_of(trainer)
    answer["boxes"], answer["whole_for_boxes"] = boxes_of(trainer)
    if job["options"].get("lora"):
        manifest = trainer.manifest("adapter")
        answer["adapter"] = {shard.name: shard.tensor.clone() for shard in trainer.weights(payload="adapter")}
        answer["adapter_manifest"] = (list(manifest.tensors), manifest.adapter)
    if job["memory"]:
        answer["gathered"] = {size: largest_gathered(trainer, size) for size in job["memory"]}
        answer["live_bytes"] = {part: trainer.live_bytes(part) for part in ("weights", "optimizer")}
        trainer.offload(["weights", "gradients", "optimizer"])
        answer["offloaded_bytes"] = [trainer.live_bytes(part) for part in ("weights", "gradients", "optimizer")]
        trainer.onload(["weights", "gradients", "optimizer"])
        answer["again"] = weights_of(trainer)
    if job["take"] is not None:
        asyncio.run(take(trainer, job["take"], boxes=True))
        answer["taken"] = weights_of(trainer)
        answer["computed_after"] = trainer.compute(mine, loss.needs)
    if job["load_model"]:
        trainer.load_model(Path(job["load_model"]), decay=0.5)
        answer["loaded"] = weights_of(trainer)
    trainer.close()
    return answer


def main(number: str, folder: str) -> None:
    """The program of rank ``number``."""
    rank, directory = int(number), Path(folder)
    torch.set_num_threads(1)
    work = torch.load(directory / "work.pt", weights_only=False)
    for name, job in work["jobs"].items():
        if rank < job["world"]:
            # Ranks that wait for each other show where.
            faulthandler.dump_traceback_later(JOB_DEADLINE_S, exit=True)
            answer = do_job(job, rank, work["batch"])
            faulthandler.cancel_dump_traceback_later()
            torch.save(answer, directory / f"{name}.rank{rank}.pt")
