"""A trainer of the bigram model: exact gradients, weights sharded by rows over gloo ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from chatlearn_core.batching import micro_batches
from chatlearn_core.exceptions import BackendError, CheckpointError, ConfigError, ModelError
from chatlearn_core.metrics.durable_files import file_facts
from chatlearn_core.plugins.records import Export
from chatlearn_core.protocols import Loss, LossOutput, MemoryPart, RoleContext, WeightLoader
from chatlearn_core.types import (
    FileFacts,
    Metric,
    Metrics,
    OutputRequest,
    Outputs,
    Payload,
    TrainBatch,
    WeightManifest,
    WeightShard,
    merge_metrics,
)
from chatlearn_hosting.engine_side.private_store import PrivateStore
from chatlearn_hosting.rendezvous import make_default_group
from chatlearn_testing.fakes.bigram import (
    TRANSITION,
    UNIGRAM,
    bigram_logits,
    bigram_manifest,
    read_bigram_tensors,
    write_bigram_model,
)
from chatlearn_testing.fakes.engine_arguments import refuse_engine_arguments
from chatlearn_testing.fakes.options import FakeTrainerOptions
from chatlearn_testing.fakes.trainer_loader import FakeTrainerLoader
from chatlearn_testing.recorded_batches import record_batch

CHECKPOINT_FILE, STATE_FILE = "weights.safetensors", "state.json"


class FakeTrainer:
    """Implements ``chatlearn_core.protocols.Trainer``: gradient descent with momentum on a bigram model.

    Each rank holds some rows of every tensor and their momentum, and gathers the whole before it computes.
    """

    def __init__(self, options: FakeTrainerOptions, context: RoleContext) -> None:
        if context.model is None:
            raise ConfigError(f"roles.{context.role}: a trainer needs a model; set its model.path")
        refuse_engine_arguments(context)
        self.options = options
        self.context = context
        self._directory = Path(context.model.path)
        self._weights: dict[str, Tensor] = {}
        """This rank's rows."""
        self._momentum: dict[str, Tensor] = {}
        self._manifest = WeightManifest({})
        self._away: dict[MemoryPart, dict[str, Tensor]] = {}
        """Tensors of offloaded parts; the trainer then holds empty tensors in their place."""
        self._store: PrivateStore | None = None
        self._ready = False

    def setup(self) -> None:
        tensors = read_bigram_tensors(self._directory)
        if self.context.world_size > 1:
            assert self.context.rendezvous is not None, "the runtime gives several ranks one"
            self._store = make_default_group(
                "gloo",
                self.context.rendezvous,
                rank=self.context.rank,
                world_size=self.context.world_size,
                secret=self.context.rendezvous_secret,
            )
        self._manifest = bigram_manifest(tensors)
        self._weights = self._own_rows(tensors)
        self._momentum = {name: torch.zeros_like(rows) for name, rows in self._weights.items()}
        self._ready = True

    def health(self) -> str | None:
        return None if self._ready else "not set up, or closed"

    def offload(self, parts: Collection[MemoryPart]) -> None:
        for part in set(parts) - self._away.keys():
            live = self._tensors(part)
            self._away[part] = dict(live)
            live.update({name: tensor.new_empty(0) for name, tensor in live.items()})

    def onload(self, parts: Collection[MemoryPart]) -> None:
        for part in set(parts) & self._away.keys():
            self._tensors(part).update(self._away.pop(part))

    def live_bytes(self, part: MemoryPart) -> int:
        return sum(tensor.nbytes for tensor in self._tensors(part).values())

    def _tensors(self, part: MemoryPart) -> dict[str, Tensor]:
        """Return the tensors of a part; gradients exist only during an update."""
        return {"weights": self._weights, "optimizer": self._momentum}.get(part, {})

    def close(self) -> None:
        if self._ready and self.context.world_size > 1:
            dist.destroy_process_group()
            if self._store is not None:
                self._store.close()
        self._ready = False
        self._weights, self._momentum = {}, {}

    @property
    def data_parallel_rank(self) -> int:
        return self.context.rank

    @property
    def data_parallel_size(self) -> int:
        return self.context.world_size

    def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """See the protocol. Ignores the token budget: one pass suffices, since no backward pass follows."""
        self._require("weights")
        with torch.no_grad():
            return _outputs(self._whole(self._weights), batch, request)

    def update(self, batch: TrainBatch, loss: Loss) -> Metrics:
        """See the protocol."""
        self._require("weights", "gradients", "optimizer")
        if not self.context.trainable:
            raise BackendError(f"trainer role {self.context.role!r} does not learn, so it has no optimizer")
        if self.options.record is not None:
            record_batch(Path(self.options.record), self.context, batch)
        whole = {name: tensor.requires_grad_() for name, tensor in self._whole(self._weights).items()}
        budget = self.options.max_tokens_per_micro_batch
        results: list[LossOutput] = []
        for indices in micro_batches(batch.lengths, batch.unit_index.tolist(), budget):
            micro = batch.select(indices)
            result = loss(_outputs(whole, micro, loss.needs), micro)
            if result.total.requires_grad:
                result.total.backward()  # type: ignore[no-untyped-call]  # torch
            results.append(result)
        gradients = {n: t.grad if t.grad is not None else torch.zeros_like(t) for n, t in whole.items()}
        total = math.fsum(float(result.total.detach()) for result in results)
        global_loss = torch.tensor(total)
        if self.data_parallel_size > 1:
            for name in sorted(gradients):
                dist.all_reduce(gradients[name])
            dist.all_reduce(global_loss)
        norm = math.sqrt(math.fsum(float(g.double().pow(2).sum()) for g in gradients.values()))
        if not math.isfinite(float(global_loss)) or not math.isfinite(norm):
            raise BackendError(
                f"trainer role {self.context.role!r} rank {self.context.rank}: the loss ({total}) or the gradient norm"
                f" ({norm}) is not finite, in the mini-batch of samples {', '.join(batch.sample_ids)}; the weights are"
                " unchanged. Look at these samples' advantages."
            )
        for name, rows in self._own_rows(gradients).items():
            self._momentum[name].mul_(self.options.momentum).add_(rows)
            self._weights[name].sub_(self._momentum[name], alpha=self.options.learning_rate)
        own: Metrics = {"loss": Metric(total, 1.0, "sum")}
        if self.data_parallel_rank == 0:
            own |= {"grad_norm": Metric(norm), "lr": Metric(self.options.learning_rate)}
        return merge_metrics(*(result.metrics for result in results)) | own

    def save(self, directory: Path) -> Mapping[str, FileFacts]:
        """See the protocol. Rank 0 writes the tensors of all ranks, and its random state for all."""
        self._require("weights", "optimizer")
        weights, momentum = self._whole(self._weights), self._whole(self._momentum)
        if self.context.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            content = weights | {f"momentum/{name}": tensor for name, tensor in momentum.items()}
            save_file(content, directory / CHECKPOINT_FILE)
            state = {"format": 1, "random": bytes(torch.get_rng_state().tolist()).hex()}
            (directory / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
        if self.data_parallel_size > 1:
            dist.barrier()
        return file_facts(directory, [CHECKPOINT_FILE, STATE_FILE]) if self.context.rank == 0 else {}

    def load(self, directory: Path) -> None:
        self._require("weights", "optimizer")
        if not (directory / STATE_FILE).is_file():
            raise CheckpointError(f"{directory} is not a complete trainer checkpoint: {STATE_FILE} is missing")
        file = directory / CHECKPOINT_FILE
        try:
            content = load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} is missing or damaged ({error}); use an earlier checkpoint") from error
        shapes = {name: tuple(content[name].shape) for name in content if not name.startswith("momentum/")}
        if shapes != {name: spec.shape for name, spec in self._manifest.tensors.items()}:
            raise CheckpointError(f"{file} is of another model: it holds {shapes}")
        self._weights = self._own_rows({name: content[name] for name in shapes})
        self._momentum = self._own_rows({name: content[f"momentum/{name}"] for name in shapes})
        state = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["random"])), dtype=torch.uint8))

    def load_model(self, directory: Path, *, fresh_optimizer: bool = True, decay: float = 0.0) -> None:
        self._require("weights", "optimizer")
        found = read_bigram_tensors(directory)
        lines = self._manifest.differences(bigram_manifest(found))
        if lines:
            raise ModelError(f"{directory} holds another model: {'; '.join(lines)}")
        self._blend(found, decay)
        if fresh_optimizer:
            self._momentum = {name: torch.zeros_like(rows) for name, rows in self._weights.items()}

    def weight_loader(self, decay: float) -> WeightLoader:
        """See ``WeightTakingTrainer``."""

        def finish(tensors: Mapping[str, Tensor]) -> None:
            self._require("weights", "optimizer")
            self._blend(tensors, decay)
            self._momentum = {name: torch.zeros_like(rows) for name, rows in self._weights.items()}

        name = f"trainer role {self.context.role!r} rank {self.context.rank}"
        return FakeTrainerLoader(self._manifest, finish, name)

    def _blend(self, tensors: Mapping[str, Tensor], decay: float) -> None:
        for name, rows in self._own_rows(tensors).items():
            self._weights[name].mul_(decay).add_(rows, alpha=1 - decay)

    def export_model(self, directory: Path) -> None:
        self._require("weights")
        whole = self._whole(self._weights)
        if self.context.rank == 0:
            write_bigram_model(directory, whole)
        if self.data_parallel_size > 1:
            dist.barrier()

    def manifest(self, payload: Payload = "full") -> WeightManifest:
        return self._manifest

    def weights(self, export: Export = "full_tensors", payload: Payload = "full") -> Iterator[WeightShard]:
        """See the protocol. ``boxes`` needs no communication; it has no adapters."""
        self._require("weights")
        for name, spec in self._manifest.tensors.items():
            start, stop = self._rows(spec.shape[0])
            if export == "boxes":
                rest = tuple((0, size) for size in spec.shape[1:])
                yield WeightShard(name, spec.shape, ((start, stop), *rest), self.context.rank, self._weights[name])
            else:
                whole = self._gather(self._weights[name], spec.shape[0])
                yield WeightShard(name, spec.shape, tuple((0, size) for size in spec.shape), 0, whole)

    def _require(self, *parts: MemoryPart) -> None:
        if not self._ready:
            raise BackendError(f"trainer role {self.context.role!r} is not set up, or was closed")
        if away := self._away.keys() & set(parts):
            raise BackendError(f"trainer role {self.context.role!r}: onload {', '.join(sorted(away))} first")

    def _rows(self, count: int) -> tuple[int, int]:
        rank, size = self.context.rank, self.context.world_size
        return count * rank // size, count * (rank + 1) // size

    def _own_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor[slice(*self._rows(tensor.shape[0]))].clone() for name, tensor in tensors.items()}

    def _whole(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._gather(rows[name], spec.shape[0]) for name, spec in self._manifest.tensors.items()}

    def _gather(self, rows: Tensor, count: int) -> Tensor:
        """Gather the rows of all ranks in order; returns a copy."""
        size = self.context.world_size
        if size == 1:
            return rows.clone()
        parts = [rows.new_empty(count * (r + 1) // size - count * r // size, *rows.shape[1:]) for r in range(size)]
        for rank, part in enumerate(parts):
            if rank == self.context.rank:
                part.copy_(rows)
            dist.broadcast(part, rank)
        return torch.cat(parts)


def _outputs(weights: Mapping[str, Tensor], batch: TrainBatch, request: OutputRequest) -> Outputs:
    """``logprobs`` and ``entropy`` [T], 0 outside the loss mask."""
    logits = bigram_logits(weights[TRANSITION], weights[UNIGRAM], batch.token_ids) / request.temperature
    distribution = torch.log_softmax(logits, -1)
    made: Outputs = {}
    if "logprobs" in request.names:
        chosen = distribution[:-1].gather(-1, batch.token_ids[1:, None])[:, 0]
        made["logprobs"] = torch.cat([chosen.new_zeros(min(1, batch.num_tokens)), chosen]).masked_fill(
            ~batch.loss_mask, 0.0
        )
    if "entropy" in request.names:
        entropy = -(distribution.exp() * distribution).sum(-1)
        shifted = torch.cat([entropy.new_zeros(min(1, batch.num_tokens)), entropy[:-1]])
        made["entropy"] = shifted.masked_fill(~batch.loss_mask, 0.0)
    return made
