"""The trainer ``acme``."""

from __future__ import annotations

import math
import pickle
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
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
    merge_metrics,
)
from chatlearn_losses import prediction_rows, token_logprobs
from torch import Tensor

from acme_plugin.model import BigramModel, load_model, save_model
from acme_plugin.options import AcmeOptions

CHECKPOINT_FILE = "trainer.pt"


class AcmeTrainer:
    """One process, one model, AdamW. Implements ``chatlearn_core.protocols.Trainer``."""

    def __init__(self, options: AcmeOptions, context: RoleContext) -> None:
        if context.model is None:
            raise ConfigError(f"roles.{context.role}: a trainer needs a model; set its model.path")
        if context.engine_arguments:
            raise ConfigError(
                f"roles.{context.role}.engine: 'acme' takes no engine arguments; remove"
                f" {', '.join(sorted(context.engine_arguments))}"
            )
        self.options = options
        self.context = context
        self._source = context.model
        self._model: BigramModel | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._offloaded: set[MemoryPart] = set()

    def setup(self) -> None:
        self._model = load_model(Path(self._source.path)).to(self.context.device)
        self._model.requires_grad_(self.context.trainable)
        if self.context.trainable:
            self._optimizer = torch.optim.AdamW(
                self._model.parameters(), lr=self.options.learning_rate, weight_decay=self.options.weight_decay
            )

    def health(self) -> str | None:
        return None if self._model is not None else "not set up, or closed"

    def offload(self, parts: Collection[MemoryPart]) -> None:
        self._offloaded |= set(parts) & {"weights", "gradients", "optimizer"}
        self._move(parts, "cpu")

    def onload(self, parts: Collection[MemoryPart]) -> None:
        self._offloaded -= set(parts)
        self._move(parts, self.context.device)

    def close(self) -> None:
        self._model = None
        self._optimizer = None

    @property
    def data_parallel_rank(self) -> int:
        return 0

    @property
    def data_parallel_size(self) -> int:
        return 1

    def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """See the protocol. Nothing is kept for a backward pass, so the batch is computed at once."""
        model = self._ready("weights")
        with torch.no_grad():
            outputs = self._outputs(model, batch.to(self.context.device), request)
        return {name: tensor.cpu() for name, tensor in outputs.items()}

    def update(self, batch: TrainBatch, loss: Loss) -> Metrics:
        """See the protocol. Losses of micro-batches add up to that of the mini-batch, and so do their gradients."""
        model = self._ready("weights", "gradients", "optimizer")
        if self._optimizer is None:
            raise BackendError(
                f"{self.name} does not learn: the algorithm has no loss for it, so it has no optimizer and "
                "cannot update"
            )
        total, parts = 0.0, []
        try:
            for indices in micro_batches(
                batch.lengths, batch.unit_index.tolist(), self.options.max_tokens_per_micro_batch, at_least=1
            ):
                micro = batch.select(indices).to(self.context.device)
                result = loss(self._outputs(model, micro, loss.needs), micro)
                if result.total.requires_grad:
                    result.total.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
                total += float(result.total.detach())
                parts.append(result.metrics)
        except BaseException:
            self._optimizer.zero_grad()  # of the micro-batches before the failure
            raise
        norm = self._clip(model)
        if not math.isfinite(total) or not math.isfinite(norm):
            self._optimizer.zero_grad()
            raise BackendError(
                f"{self.name}: the loss ({total}) or the gradient norm ({norm}) is not finite, in the mini-batch of "
                f"samples {', '.join(batch.sample_ids[:16])}; the weights are unchanged. Look at these samples' "
                "rewards and logprobs"
            )
        self._optimizer.step()
        self._optimizer.zero_grad()
        own = {
            "loss": Metric(total, 1.0, "sum"),
            "grad_norm": Metric(norm),
            "lr": Metric(self.options.learning_rate),
        }
        return merge_metrics(*parts) | own

    def save(self, directory: Path) -> Mapping[str, FileFacts]:
        model = self._ready("weights", "optimizer")
        directory.mkdir(parents=True, exist_ok=True)
        optimizer = None if self._optimizer is None else self._optimizer.state_dict()
        content = {"model": model.state_dict(), "optimizer": optimizer, "random": torch.get_rng_state()}
        torch.save(content, directory / CHECKPOINT_FILE)
        return file_facts(directory, [CHECKPOINT_FILE])

    def load(self, directory: Path) -> None:
        model = self._ready("weights", "optimizer")
        file = directory / CHECKPOINT_FILE
        try:
            content = torch.load(file, map_location=self.context.device, weights_only=True)
            model.load_state_dict(content["model"])
            if self._optimizer is not None:
                self._optimizer.load_state_dict(content["optimizer"])
            torch.set_rng_state(content["random"].cpu())
        except (OSError, EOFError, RuntimeError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{file} is missing, damaged or of another model: {error}; resume from an earlier checkpoint"
            ) from error

    def load_model(self, directory: Path, *, fresh_optimizer: bool = True, decay: float = 0.0) -> None:
        model = self._ready("weights", "optimizer")
        found = load_model(directory)
        shapes = [{name: tensor.shape for name, tensor in one.state_dict().items()} for one in (found, model)]
        if shapes[0] != shapes[1]:
            raise ModelError(f"{self.name}: {directory} holds another model: {shapes[0]}")
        with torch.no_grad():
            for own, other in zip(model.parameters(), found.parameters(), strict=True):
                own.mul_(decay).add_(other.to(own), alpha=1 - decay)
        if fresh_optimizer and self._optimizer is not None:
            self._optimizer.state.clear()

    def export_model(self, directory: Path) -> None:
        """Weights and configuration; a bigram model has no tokenizer."""
        save_model(self._ready("weights"), directory)

    def manifest(self, payload: Payload = "full") -> WeightManifest:
        state = self._ready().state_dict()
        return WeightManifest({n: TensorSpec(n, tuple(t.shape), str(t.dtype).split(".")[1]) for n, t in state.items()})

    def weights(self, export: Export = "full_tensors", payload: Payload = "full") -> Iterator[WeightShard]:
        """See the protocol. Yields every tensor whole, owned by the single rank."""
        for name, tensor in self._ready("weights").state_dict().items():
            shape = tuple(tensor.shape)
            yield WeightShard(name, shape, tuple((0, size) for size in shape), 0, tensor.detach())

    @property
    def name(self) -> str:
        """For messages."""
        return f"trainer 'acme', role {self.context.role!r} rank {self.context.rank}"

    def _ready(self, *parts: MemoryPart) -> BigramModel:
        if self._model is None:
            raise BackendError(f"{self.name} is not set up, or was closed")
        if away := self._offloaded & set(parts):
            raise BackendError(f"{self.name}: {', '.join(sorted(away))} is offloaded; onload it first")
        return self._model

    def _outputs(self, model: BigramModel, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """Per token [T], 0 where the loss mask is False: logits of row t - 1 predict token t."""
        rows, targets = prediction_rows(batch.cu_seqlens, batch.loss_mask.cpu())
        rows, targets = rows.to(batch.token_ids.device), targets.to(batch.token_ids.device)
        scored = token_logprobs(
            model(batch.token_ids[rows]),
            batch.token_ids[targets],
            temperature=request.temperature,
            with_entropy="entropy" in request.names,
        )

        def per_token(values: Tensor) -> Tensor:
            return values.new_zeros(batch.num_tokens).index_copy(0, targets, values)

        outputs: Outputs = {"logprobs": per_token(scored.logprobs)}
        if scored.entropy is not None:
            outputs["entropy"] = per_token(scored.entropy)
        return {name: outputs[name] for name in request.names}

    def _clip(self, model: BigramModel) -> float:
        """Clip the gradients; returns their norm before clipping."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.options.grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), self.options.grad_clip, norm)
        return float(norm)

    def _move(self, parts: Collection[MemoryPart], device: str) -> None:
        if self._model is None:
            return
        for parameter in self._model.parameters():
            if "weights" in parts:
                parameter.data = parameter.data.to(device)
            if "gradients" in parts and parameter.grad is not None:
                parameter.grad = parameter.grad.to(device)
            if "optimizer" in parts and self._optimizer is not None:
                state = self._optimizer.state[parameter]
                state.update({n: value.to(device) for n, value in state.items() if n != "step"})
