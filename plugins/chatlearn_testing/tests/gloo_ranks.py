"""What each rank of the gloo tests runs, in a process of its own: ``python gloo_ranks.py SCENARIO RANK DIRECTORY``."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_testing.batches import MaskedPolicyLoss, make_batch
from chatlearn_testing.fakes.box_sync import FakeBoxSender
from chatlearn_testing.fakes.options import FakeOptions, FakeTrainerOptions
from chatlearn_testing.fakes.trainer import FakeTrainer

VOCABULARY, HIDDEN = 32, 8


def two_rank_trainer(rank: int, directory: Path) -> object:
    """Two updates on this rank's sequences, then send the boxes that it holds."""
    source = ModelSource(str(directory / "model"), str(directory / "model"))
    context = RoleContext(
        "trainer", source, rank=rank, world_size=2, trainable=True, rendezvous=f"file://{directory}/rendezvous"
    )
    trainer = FakeTrainer(FakeTrainerOptions(max_tokens_per_micro_batch=24), context)
    trainer.setup()
    loss = MaskedPolicyLoss()
    prepared = loss.prepare(make_batch(VOCABULARY))
    own = prepared.select(range(rank, prepared.num_sequences, 2))
    metrics = [trainer.update(own, loss) for _ in range(2)]
    plan = pickle.loads((directory / "plan").read_bytes())
    sender = FakeBoxSender(FakeOptions(), plan.senders[rank])
    sender.offer(plan)
    sender.send(plan, trainer)
    shapes = {shard.name: tuple(shard.tensor.shape) for shard in trainer.weights("boxes")}
    whole = {shard.name: shard.tensor for shard in trainer.weights()}
    trainer.save(directory / "checkpoint")
    trainer.close()
    return metrics, shapes, whole


def two_stages(rank: int, directory: Path) -> object:
    """Stage 0 embeds, stage 1 holds the head and is the only one that ever sees the loss."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    loss = MaskedPolicyLoss()
    prepared = loss.prepare(make_batch(VOCABULARY))
    embedding, head = stage_weights()
    total = torch.zeros(())
    for micro in (prepared.select([0, 1, 2]), prepared.select([3, 4, 5, 6]), prepared.select([])):
        hidden = torch.empty(micro.num_tokens, HIDDEN)
        if rank == 0:
            hidden = embedding[micro.token_ids].tanh()
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            dist.recv(hidden, 0)
            hidden.requires_grad_()
            result = loss(stage_outputs(hidden, head, micro), micro)
            result.total.backward()
            total += result.total.detach()
            dist.send(hidden.grad if hidden.grad is not None else torch.zeros_like(hidden), 0)
    dist.destroy_process_group()
    return float(total), (embedding if rank == 0 else head).grad


def stage_weights() -> tuple[torch.Tensor, torch.Tensor]:
    """[V, H] of stage 0 and [H, V] of stage 1."""
    generator = torch.Generator().manual_seed(3)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    head = torch.randn(HIDDEN, VOCABULARY, generator=generator)
    return embedding.requires_grad_(), head.requires_grad_()


def stage_outputs(hidden: torch.Tensor, head: torch.Tensor, batch) -> dict[str, torch.Tensor]:
    """``logprobs`` [T] of the two-stage model, 0 outside the mask."""
    distribution = torch.log_softmax(hidden @ head, -1)
    chosen = distribution[:-1].gather(-1, batch.token_ids[1:, None])[:, 0]
    logprobs = torch.cat([hidden.sum(-1)[:1] * 0, chosen])
    return {"logprobs": logprobs * batch.loss_mask}


if __name__ == "__main__":
    torch.set_num_threads(1)
    scenario, number, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    answer = {"two_rank_trainer": two_rank_trainer, "two_stages": two_stages}[scenario](number, folder)
    partial = folder / f"answer-{number}.partial"
    partial.write_bytes(pickle.dumps(answer))
    partial.replace(folder / f"answer-{number}")
