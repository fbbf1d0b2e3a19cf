"""One rank of trainers that need several, forked by the fixture ``run_jobs`` from a process that has this imported.

``work.pt`` in its directory lists jobs, which the process does one after the other. A rank takes part in a job that has
that many ranks, and leaves its answer in ``<job>.rank<r>.pt``.
"""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import torch

from chatlearn_core.protocols import LossOutput, ModelSource, RoleContext
from chatlearn_core.types import Box, OutputRequest, Outputs, Payload, TrainBatch, WeightShard
from chatlearn_hf.meta_start import CheckpointFiles
from chatlearn_megatron.options import MegatronOptions
from chatlearn_megatron.trainer import MegatronTrainer

TEMPERATURE = 0.7
REQUESTS = {
    "lm": {"logprobs", "entropy", "topk_ids", "topk_logprobs", "logprobs_at", "hidden_states"},
    "value": {"values"},
    "reward": {"scores"},
}


class HeadLoss:
    """-sum w (A logprob + 0.1 entropy), sum w (value - A)^2, or sum (score - target)^2."""

    unit = "sequence"

    def __init__(self, head: str) -> None:
        names = {"lm": {"logprobs", "entropy"}, "value": {"values"}, "reward": {"scores"}}[head]
        self.needs = OutputRequest(frozenset(names), TEMPERATURE)
        self.head = head

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        return batch

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        weight, advantage = batch.token_data["loss_weight"], batch.token_data["advantages"]
        if self.head == "lm":
            return LossOutput(-(weight * (advantage * outputs["logprobs"] + 0.1 * outputs["entropy"])).sum())
        if self.head == "value":
            return LossOutput((weight * (outputs["values"] - advantage) ** 2).sum())
        return LossOutput(((outputs["scores"] - batch.sequence_data["target"]) ** 2).sum())


class _Reading:
    """Counts the elements that this process reads from model directories."""

    elements = 0


def _count_reads() -> None:
    box = CheckpointFiles.box

    def counted(files: CheckpointFiles, name: str, wanted: Box) -> torch.Tensor:
        part = box(files, name, wanted)
        _Reading.elements += part.numel()
        return part

    CheckpointFiles.box = counted  # type: ignore[method-assign]  # this process is the test's


def _count_forced_gathers(trainer: MegatronTrainer) -> list[Any]:
    """Return a list that grows whenever all weights of a chunk are gathered at once."""
    forced: list[Any] = []
    for replica in trainer._replicas:
        gather = replica.start_param_sync

        def counted(*rest: Any, force_sync: bool = False, gather: Any = gather, **named: Any) -> None:
            forced.extend([None] * force_sync)
            gather(*rest, force_sync=force_sync, **named)

        replica.start_param_sync = counted
    return forced


def do_job(job: dict[str, Any], rank: int, batch: TrainBatch) -> dict[str, Any]:
    """Do what the job says, and return what the rank saw.

    With adapters the answer has their tensors before and after every update.

    Keys: ``model``, ``head``, ``world``, ``options``, ``engine``, ``updates``; ``load`` and ``save``: directories of
    checkpoints, ``more``: updates after saving; ``export``: a model directory to write; ``take``: file of another
    trainer's stream of boxes, which this one follows at the end.
    """
    context = RoleContext(
        "trainer",
        ModelSource(job["model"], job["model"], head=job["head"]),
        rank=rank,
        world_size=job["world"],
        trainable=True,
        rendezvous=job["rendezvous"],
        engine_arguments=job["engine"],
    )
    options = {"learning_rate": 1.0, "optimizer": "sgd", "grad_clip": None, "max_tokens_per_micro_batch": 60}
    trainer = MegatronTrainer(MegatronOptions(**(options | job["options"])), context)
    _Reading.elements = 0
    trainer.setup()
    read, held = _Reading.elements, [parameter.numel() for parameter in trainer._ready().parameters()]
    if job["load"]:
        trainer.load(Path(job["load"]))
    count = trainer.data_parallel_size
    own = list(range(trainer.data_parallel_rank, batch.num_sequences, count))
    mine = batch.select(own)
    answer: dict[str, Any] = {"own": own, "before": _full(trainer), "read": read, "held": sum(held)}
    request = OutputRequest(frozenset(REQUESTS[job["head"]]), TEMPERATURE, {"k": 3, "ids": "chosen"})
    answer["computed"] = trainer.compute(mine, request)
    forced = _count_forced_gathers(trainer)
    adapted = trainer.options.lora is not None
    answer["metrics"], answer["adapters"] = [], [_full(trainer, "adapter")] if adapted else []
    for _ in range(job["updates"]):
        metrics = trainer.update(mine, HeadLoss(job["head"]))
        answer["metrics"].append({name: metric.total for name, metric in metrics.items()})
        if adapted:
            answer["adapters"].append(_full(trainer, "adapter"))
    answer["forced_gathers"] = len(forced)
    left = [parameter.detach().clone() for parameter in trainer._ready().parameters()]
    answer["stepped"] = _full(trainer) if job["save"] else {}
    if job["save"]:
        answer["facts"] = trainer.save(Path(job["save"]))
    for _ in range(job["more"]):
        trainer.update(mine, HeadLoss(job["head"]))
    answer["after"] = _full(trainer)
    if not job["more"]:
        answer["gathered_late"] = sum(
            not torch.equal(one, other) for one, other in zip(left, trainer._ready().parameters(), strict=True)
        )
    if adapted:
        answer["trained"] = _full(trainer, "adapter")
        answer["computed_after"] = trainer.compute(mine, request)
        answer["adapter_config"] = dict(trainer.manifest("adapter").adapter)
        answer["adapter_elements"] = sum(piece.view.numel() for piece in trainer._ready().adapter_pieces())
    answer["gradient_elements"] = sum(tensor.numel() for tensor in trainer._all_tensors("gradients"))
    state = [tensor for tensor in trainer._all_tensors("optimizer") if tensor.dim()]
    answer["optimizer_elements"] = sum(tensor.numel() for tensor in state)
    answer["master_dtypes"] = {tensor.dtype for tensor in state}
    if job["export"]:
        trainer.export_model(Path(job["export"]))
    answer["boxes"] = [
        (shard.name, shard.global_shape, shard.box, shard.owner_rank, shard.tensor.clone())
        for shard in trainer.weights("boxes")
    ]
    trainer.offload(["weights", "gradients", "optimizer"])
    answer["offloaded_bytes"] = sum(trainer.live_bytes(part) for part in ("weights", "gradients", "optimizer"))
    trainer.onload(["weights", "gradients", "optimizer"])
    answer["again"] = _full(trainer)
    if job["take"]:
        sent = torch.load(job["take"], weights_only=False)

        async def take() -> None:
            loader = trainer.weight_loader(0.0)
            await loader.begin(1, trainer.manifest())
            for entry in sent:
                await loader.load_boxes([WeightShard(*entry)])
            await loader.finish()

        asyncio.run(take())
        answer["taken"] = _full(trainer)
        answer["taken_adapters"] = _full(trainer, "adapter") if adapted else {}
    trainer.close()
    return answer


def _full(trainer: MegatronTrainer, payload: Payload = "full") -> dict[str, torch.Tensor]:
    return {shard.name: shard.tensor.clone() for shard in trainer.weights(payload=payload)}


def main(number: str, folder: str) -> None:
    """The program of rank ``number``."""
    warnings.filterwarnings("ignore")
    _count_reads()
    rank, directory = int(number), Path(folder)
    torch.set_num_threads(1)
    work = torch.load(directory / "work.pt", weights_only=False)
    for name, job in work["jobs"].items():
        if rank < job["world"]:
            answer = do_job(job, rank, work["batch"])
            torch.save(answer, directory / f"{name}.rank{rank}.pt")
