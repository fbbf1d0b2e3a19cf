"""A trainer with pipeline stages, each split into shards, which shows that the contract suits sharded backends.

Rank ``stage * shards + shard`` holds some rows of its stage's tensors. The first stage embeds, only the last one
computes the loss and the outputs, and only rank 0 knows the whole manifest; every rank streams boxes and writes its own
checkpoint file, which no other layout can load.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from chatlearn_core.batching import micro_batches
from chatlearn_core.exceptions import BackendError, CheckpointError, ConfigError, ModelError
from chatlearn_core.metrics.durable_files import file_facts
from chatlearn_core.plugins.records import Export
from chatlearn_core.protocols import Loss, MemoryPart, RoleContext
from chatlearn_core.types import (
    FileFacts,
    Metric,
    Metrics,
    OutputRequest,
    Outputs,
    Payload,
    TensorSpec,
    TrainBatch,
    WeightManifest,
    WeightShard,
    full_box,
    merge_metrics,
)
from chatlearn_hosting.engine_side.private_store import PrivateStore
from chatlearn_hosting.rendezvous import make_default_group
from chatlearn_testing.fakes.engine_arguments import refuse_engine_arguments
from chatlearn_testing.fakes.options import FakePipelineOptions
from chatlearn_testing.fakes.plain_llama import (
    EMBEDDING,
    HEAD,
    NORM,
    LlamaShape,
    embed,
    logits,
    read_rows,
    run_layers,
    tensor_shapes,
)

STATE_FILE = "layout.json"


class FakePipelineTrainer:
    """Implements ``Trainer``: gradient descent with momentum, one micro-batch after another."""

    def __init__(self, options: FakePipelineOptions, context: RoleContext) -> None:
        if context.model is None:
            raise ConfigError(f"roles.{context.role}: a trainer needs a model; set its model.path")
        refuse_engine_arguments(context)
        if context.world_size % options.stages:
            raise ConfigError(
                f"roles.{context.role}: ranks is {context.world_size}, which options.stages {options.stages} does not "
                f"divide; nearest: {options.stages * max(1, round(context.world_size / options.stages))} ranks"
            )
        self.options = options
        self.context = context
        self.shards = context.world_size // options.stages
        self.stage, self.shard = divmod(context.rank, self.shards)
        self._directory = Path(context.model.path)
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Name -> full shape of this stage's tensors."""
        self._weights: dict[str, Tensor] = {}
        """This rank's rows of these tensors."""
        self._momentum: dict[str, Tensor] = {}
        self._store: PrivateStore | None = None
        self._group: Any = None
        """Process group of this stage's ranks; None if there is only one."""
        self._ready = False

    # Lifecycle

    def setup(self) -> None:
        if self.context.world_size > 1:
            assert self.context.rendezvous is not None, "the runtime gives several ranks one"
            self._store = make_default_group(
                "gloo",
                self.context.rendezvous,
                rank=self.context.rank,
                world_size=self.context.world_size,
                secret=self.context.rendezvous_secret,
            )
            for stage in range(self.options.stages if self.shards > 1 else 0):
                group = dist.new_group([stage * self.shards + shard for shard in range(self.shards)])
                self._group = group if stage == self.stage else self._group
        self._shape = LlamaShape.read(self._directory)
        layers = self._shape.num_layers
        first, last = (layers * (self.stage + i) // self.options.stages for i in (0, 1))
        self._layers = range(first, last)
        self._read(self._directory)
        self._momentum = {name: torch.zeros_like(rows) for name, rows in self._weights.items()}
        self._ready = True

    def health(self) -> str | None:
        return None if self._ready else "not set up, or closed"

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """Do nothing: this trainer never shares a device."""

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """See ``offload``."""

    def close(self) -> None:
        if self._ready and self.context.world_size > 1:
            dist.destroy_process_group()
            if self._store is not None:
                self._store.close()
        self._ready = False
        self._weights, self._momentum = {}, {}

    # Trainer

    @property
    def data_parallel_rank(self) -> int:
        """All ranks take the same batch."""
        return 0

    @property
    def data_parallel_size(self) -> int:
        return 1

    @property
    def is_first(self) -> bool:
        """Whether this rank embeds."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank computes outputs and loss."""
        return self.stage == self.options.stages - 1

    def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """See the protocol. Only ranks of the last stage return outputs."""
        self._require_ready()
        with torch.no_grad():
            whole = self._whole()
            _, hidden = self._forward(whole, batch)
            return self._outputs(whole, hidden, batch, request) if self.is_last else {}

    def update(self, batch: TrainBatch, loss: Loss) -> Metrics:
        """The loss's metrics come from the last stage, ``grad_norm`` and ``lr`` from the first; of several shards only
        the first reports.
        """
        self._require_ready()
        whole = {name: tensor.requires_grad_() for name, tensor in self._whole().items()}
        total, parts = 0.0, []
        budget = self.options.max_tokens_per_micro_batch
        for indices in micro_batches(batch.lengths, batch.unit_index.tolist(), budget):
            micro = batch.select(indices)
            arrived, hidden = self._forward(whole, micro)
            if self.is_last:
                result = loss(self._outputs(whole, hidden, micro, loss.needs), micro)
                parts.append(result.metrics)
                total += float(result.total.detach())
                # An empty loss still needs its backward pass: the stage before waits for the gradient.
                (result.total + hidden.sum() * 0.0).backward()  # type: ignore[no-untyped-call]  # torch
            else:
                gradient = torch.empty_like(hidden)
                dist.recv(gradient, self.context.rank + self.shards)
                hidden.backward(gradient)  # type: ignore[no-untyped-call]  # torch
            if not self.is_first:
                assert arrived.grad is not None
                dist.send(arrived.grad, self.context.rank - self.shards)
        gradients = {n: t.grad if t.grad is not None else torch.zeros_like(t) for n, t in whole.items()}
        squares = math.fsum(float(g.double().pow(2).sum()) for g in gradients.values())
        found = torch.tensor([total if self.is_last else 0.0, squares], dtype=torch.float64)
        if self.context.world_size > 1:
            dist.all_reduce(found.mul_(1.0 if self.shard == 0 else 0.0))
        norm = math.sqrt(float(found[1]))
        if not math.isfinite(float(found[0])) or not math.isfinite(norm):
            raise BackendError(
                f"trainer role {self.context.role!r} rank {self.context.rank}: the loss ({float(found[0])}) or the "
                f"gradient norm ({norm}) is not finite, in the mini-batch of samples {', '.join(batch.sample_ids)}; "
                "the weights are unchanged. Look at these samples' advantages."
            )
        for name, gradient in gradients.items():
            start, stop = self._rows(name)
            self._momentum[name].mul_(self.options.momentum).add_(gradient[start:stop])
            self._weights[name].sub_(self._momentum[name], alpha=self.options.learning_rate)
        own: Metrics = {}
        if self.shard == 0 and self.is_last:
            own |= merge_metrics(*parts) | {"loss": Metric(total, 1.0, "sum")}
        if self.shard == 0 and self.is_first:
            own |= {"grad_norm": Metric(norm), "lr": Metric(self.options.learning_rate)}
        return own

    def save(self, directory: Path) -> Mapping[str, FileFacts]:
        self._require_ready()
        directory.mkdir(parents=True, exist_ok=True)
        files = [self._rank_file()]
        save_file(self._weights | {f"momentum/{n}": t for n, t in self._momentum.items()}, directory / files[0])
        if self.context.rank == 0:
            (directory / STATE_FILE).write_text(json.dumps(self._layout()), encoding="utf-8")
            files.append(STATE_FILE)
        facts = file_facts(directory, files)
        self._barrier()
        return facts

    def load(self, directory: Path) -> None:
        self._require_ready()
        file = directory / self._rank_file()
        try:
            layout = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
            if layout != self._layout():
                raise CheckpointError(f"{directory} was written by {layout}; this trainer is {self._layout()}")
            content = load_file(file)
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{file} is missing or damaged ({error}); use an earlier checkpoint") from error
        self._weights = {name: content[name] for name in self._weights}
        self._momentum = {name: content[f"momentum/{name}"] for name in self._weights}

    def load_model(self, directory: Path, *, fresh_optimizer: bool = True, decay: float = 0.0) -> None:
        self._require_ready()
        own, other = tensor_shapes(self._directory), tensor_shapes(directory)
        # Every stage checks the whole model, so that all stages refuse a bad one.
        wrong = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
        if wrong or LlamaShape.read(directory) != self._shape:
            raise ModelError(
                f"{directory} holds another model: {', '.join(wrong[:4])} are missing on one side or have another shape"
            )
        for name, rows in self._weights.items():
            rows.mul_(decay).add_(read_rows(directory, name, *self._rows(name)), alpha=1 - decay)
        if fresh_optimizer:
            self._momentum = {name: torch.zeros_like(rows) for name, rows in self._weights.items()}

    def export_model(self, directory: Path) -> None:
        """Gather all tensors on rank 0, which writes them; models in tests are small."""
        self._require_ready()
        whole = self._whole()
        stages: list[Any] = [None] * self.context.world_size
        if self.context.world_size > 1:
            dist.gather_object(whole, stages if self.context.rank == 0 else None)
        else:
            stages = [whole]
        if self.context.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            for file in self._directory.iterdir():
                if file.is_file() and file.suffix != ".safetensors":
                    shutil.copy(file, directory / file.name)
            tensors = {name: tensor.clone() for stage in stages for name, tensor in stage.items()}
            save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        self._barrier()

    def manifest(self, payload: Payload = "full") -> WeightManifest | None:
        """Return the manifest of all stages on rank 0, and None on other ranks."""
        self._require_ready()
        specs = [TensorSpec(name, shape, "float32") for name, shape in self._shapes.items()]
        gathered: list[Any] = [specs]
        if self.context.world_size > 1:
            gathered = [None] * self.context.world_size
            dist.gather_object(specs, gathered if self.context.rank == 0 else None)
        if self.context.rank != 0:
            return None
        return WeightManifest({spec.name: spec for part in gathered for spec in part})

    def weights(self, export: Export = "full_tensors", payload: Payload = "full") -> Iterator[WeightShard]:
        """Yield this rank's rows of its stage's tensors; whole tensors are not supported."""
        self._require_ready()
        if export != "boxes":
            raise BackendError(f"trainer role {self.context.role!r} exports boxes, not {export!r}")
        for name, shape in self._shapes.items():
            box = (self._rows(name), *full_box(shape[1:]))
            yield WeightShard(name, shape, box, self.context.rank, self._weights[name])

    # Inside

    def _read(self, directory: Path) -> None:
        own = {f"model.layers.{layer}." for layer in self._layers}
        names = [EMBEDDING] * self.is_first + [NORM, HEAD] * self.is_last
        found = tensor_shapes(directory)
        self._shapes = {
            name: shape
            for name, shape in found.items()
            if name in names or any(name.startswith(prefix) for prefix in own)
        }
        self._weights = {name: read_rows(directory, name, *self._rows(name)) for name in self._shapes}

    def _rows(self, name: str) -> tuple[int, int]:
        count = self._shapes[name][0]
        return count * self.shard // self.shards, count * (self.shard + 1) // self.shards

    def _whole(self) -> dict[str, Tensor]:
        """Return copies of this stage's tensors, gathered from its shards."""
        whole: dict[str, Tensor] = {}
        for name, shape in self._shapes.items():
            tensor = torch.zeros(shape)
            start, stop = self._rows(name)
            tensor[start:stop] = self._weights[name]
            if self._group is not None:
                dist.all_reduce(tensor, group=self._group)
            whole[name] = tensor
        return whole

    def _forward(self, weights: Mapping[str, Tensor], batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Return the input [T, H] from the stage before, as a leaf, and this stage's output, which is sent to the next
        stage.
        """
        if self.is_first:
            arrived = embed(weights, batch.token_ids)
        else:
            hidden_size = next(iter(self._shapes[n][1] for n in self._shapes if n.endswith("q_proj.weight")))
            arrived = torch.empty(batch.num_tokens, hidden_size)
            dist.recv(arrived, self.context.rank - self.shards)
            arrived.requires_grad_(torch.is_grad_enabled())
        hidden = run_layers(weights, self._shape, self._layers, arrived, batch.lengths)
        if not self.is_last:
            dist.send(hidden.detach(), self.context.rank + self.shards)
        return arrived, hidden

    def _outputs(
        self, weights: Mapping[str, Tensor], hidden: Tensor, batch: TrainBatch, request: OutputRequest
    ) -> Outputs:
        """``logprobs`` [T], 0 outside the loss mask."""
        distribution = torch.log_softmax(logits(weights, self._shape, hidden) / request.temperature, -1)
        chosen = distribution[:-1].gather(-1, batch.token_ids[1:, None])[:, 0]
        shifted = torch.cat([chosen.new_zeros(min(1, batch.num_tokens)), chosen])
        return {"logprobs": shifted.masked_fill(~batch.loss_mask, 0.0)}

    def _layout(self) -> dict[str, int]:
        return {"stages": self.options.stages, "shards": self.shards}

    def _rank_file(self) -> str:
        return f"rank_{self.context.rank}.safetensors"

    def _barrier(self) -> None:
        if self.context.world_size > 1:
            dist.barrier()

    def _require_ready(self) -> None:
        if not self._ready:
            raise BackendError(f"trainer role {self.context.role!r} is not set up, or was closed")
