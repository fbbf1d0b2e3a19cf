"""One rank of a trainer in a process of its own: run by ``test_sharding.py`` as a script.

Arguments: rank, number of ranks, rendezvous, JSON of the job, directory for the results. Writes ``rank<r>.pt``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols import LossOutput, ModelSource, RoleContext
from chatlearn_core.types import OutputRequest, Outputs, TrainBatch
from chatlearn_fsdp.optimizer import optimizer_tensors
from chatlearn_fsdp.options import FSDPOptions
from chatlearn_fsdp.sharding import whole
from chatlearn_fsdp.trainer import FSDPTrainer


class ScriptLoss:
    """-sum w (A logprob + 0.1 entropy); NaN where the batch holds the sample ``poison``."""

    needs = OutputRequest(frozenset({"logprobs", "entropy"}), 0.7)
    unit = "sequence"

    def __init__(self, poison: str = "") -> None:
        self.poison = poison

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        return batch

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        weight, advantage = batch.token_data["loss_weight"], batch.token_data["advantages"]
        total = -(weight * (advantage * outputs["logprobs"] + 0.1 * outputs["entropy"])).sum()
        return LossOutput(total * float("nan") if self.poison in batch.sample_ids else total)


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    rendezvous, job, results = sys.argv[3], json.loads(sys.argv[4]), Path(sys.argv[5])
    torch.set_num_threads(1)
    batch: TrainBatch = torch.load(results / "batch.pt", weights_only=False)
    source = ModelSource(job["model"], job["model"])
    context = RoleContext(
        "trainer",
        source,
        rank=rank,
        world_size=world_size,
        trainable=True,
        rendezvous=rendezvous if world_size > 1 else None,
    )
    trainer = FSDPTrainer(FSDPOptions(learning_rate=1e-3, **job.get("options", {})), context)
    trainer.setup()
    if job.get("load"):
        trainer.load(Path(job["load"]))
    mine = batch.select(job["slices"][rank])
    answer: dict[str, object] = {"computed": trainer.compute(mine, ScriptLoss.needs)}
    try:
        metrics = trainer.update(mine, ScriptLoss(job.get("poison", "")))
        answer["metrics"] = {name: metric.total for name, metric in metrics.items()}
    except BackendError as error:
        answer["error"] = str(error)
    if "error" not in answer:
        assert trainer._optimizer is not None
        assert trainer._model is not None
        moments = optimizer_tensors(trainer._optimizer, trainer._model.model)
        answer["exp_avg"] = {name: whole(entry["exp_avg"]) for name, entry in moments.items()}
    answer["full"] = {shard.name: shard.tensor.clone() for shard in trainer.weights()}
    answer["boxes"] = [
        (shard.name, shard.global_shape, shard.box, shard.owner_rank, shard.tensor.clone())
        for shard in trainer.weights("boxes")
    ]
    trainer.offload(["weights", "optimizer"])
    answer["offloaded_bytes"] = trainer.live_bytes("weights") + trainer.live_bytes("optimizer")
    trainer.onload(["weights", "optimizer"])
    answer["again"] = {shard.name: shard.tensor.clone() for shard in trainer.weights()}
    if job.get("save"):
        trainer.save(Path(job["save"]))
    if job.get("export"):
        trainer.export_model(Path(job["export"]))
    torch.save(answer, results / f"rank{rank}.pt")
    trainer.close()


if __name__ == "__main__":
    main()
