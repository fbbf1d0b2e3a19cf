"""The trainer ``fsdp``, one object per rank: a plain model in one process, FSDP2 over several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chatlearn_core.exceptions import BackendError
from chatlearn_core.plugins.records import Export
from chatlearn_core.protocols import MemoryPart, RoleContext, WeightLoader
from chatlearn_core.types import FileFacts, OutputRequest, Outputs, Payload, TrainBatch, WeightManifest, WeightShard
from chatlearn_fsdp import checkpoint
from chatlearn_fsdp.engine_arguments import check_engine_arguments
from chatlearn_fsdp.model_start import draw_new_adapters, read_model, start_model
from chatlearn_fsdp.options import FSDPOptions
from chatlearn_fsdp.sharding import (
    RankGroup,
    clip_gradients,
    free_gathered,
    gradient_norm,
    join_ranks,
    mesh_sizes,
    prepare_backward,
)
from chatlearn_fsdp.tensor_parallel import reduce_copies
from chatlearn_fsdp.weight_loader import LoadingHooks, ShardedWeightLoader
from chatlearn_fsdp.weight_stream import export_model, stream_adapter, stream_boxes, stream_full
from chatlearn_hf.checkpoint_names import CheckpointLayout, takes_tensors
from chatlearn_hf.forward_check import Choice, choose_forward
from chatlearn_hf.lora import LoraSettings
from chatlearn_hf.packed_forward import PackedModel, decoder_layers, requested_outputs
from chatlearn_hf.token_group import TokenGroup
from chatlearn_hf.training_noise import start_training
from chatlearn_hf.varlen_attention import PackedLayout
from chatlearn_hf.weight_export import adapter_manifest
from chatlearn_trainer_kit.micro_batch_trainer import MicroBatchTrainer
from chatlearn_trainer_kit.micro_batching import MicroBatches
from chatlearn_trainer_kit.optimizer import build_optimizer, optimizer_tensors, set_learning_rate


class FSDPTrainer(MicroBatchTrainer[PackedModel, PackedLayout]):
    """Implements ``chatlearn_core.protocols.Trainer``.

    With one rank there is no process group and the model is a plain module. With several ranks, FSDP2 shards
    parameters, gradients and optimizer state over ``context.rendezvous``, and every rank takes its own slice of a
    batch.
    """

    options: FSDPOptions
    _ranks: RankGroup | None

    def __init__(self, options: FSDPOptions, context: RoleContext) -> None:
        super().__init__(options, context)
        check_engine_arguments(context.role, context.engine_arguments)
        mesh_sizes(options, context)
        self._compute_dtype: torch.dtype = getattr(torch, options.param_dtype)
        self._master_dtype: torch.dtype = getattr(torch, options.master_dtype)
        self._layout: CheckpointLayout | None = None
        self._writer: checkpoint.BackgroundWriter | None = None
        self.choice: Choice | None = None
        """The chosen way to compute sequences, with the reasons against earlier ways; None before ``setup``."""

    # Lifecycle

    def setup(self) -> None:
        """Load the model, shard it over the ranks, and create the optimizer."""
        options, context = self.options, self.context
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        self._use_device()
        torch.manual_seed(context.seed + context.rank)
        if context.world_size > 1 or options.cpu_offload:
            self._ranks = join_ranks(options, context)
        started = start_model(options, context, self._source, self._ranks)
        self._layout, self._model = started.layout, started.packed
        self._check_forward(started.packed)
        if context.trainable:
            self._optimizer = build_optimizer(started.packed, options)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._model = None
        self._optimizer = None
        self._layout = None
        self._parts.discard()
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    # Trainer

    def save(self, directory: Path) -> Mapping[str, FileFacts]:
        model = self._ready("weights", "optimizer")
        self._wait_for_writer()
        return checkpoint.save(directory, self._state(model))

    def begin_save(self, directory: Path) -> None:
        """See ``BackgroundSavingTrainer``."""
        model = self._ready("weights", "optimizer")
        state = self._state(model)
        if self._writer is None:
            self._writer = checkpoint.BackgroundWriter(state.ranks)
        self._writer.begin(directory, state)

    def finish_save(self) -> Mapping[str, FileFacts]:
        """See ``BackgroundSavingTrainer``."""
        if self._writer is None:
            raise BackendError(f"{self._name} has no checkpoint to finish; call begin_save")
        return self._writer.finish()

    def load(self, directory: Path) -> None:
        model = self._ready("weights", "optimizer", may_be_broken=True)
        state = self._state(model)
        self._wait_for_writer()
        with self._guarding_weights(f"loading {directory}"):
            checkpoint.load(directory, state)
        self._updates = state.updates

    def load_model(self, directory: Path, *, fresh_optimizer: bool = True, decay: float = 0.0) -> None:
        model = self._ready("weights", "optimizer", may_be_broken=True)
        free_gathered(model)
        source = replace(self._source, path=str(directory))
        with self._guarding_weights(f"loading the model {directory}"):
            read_model(model.model, self._checkpoint_layout(), source, self.context, decay)
            if fresh_optimizer:
                self._start_anew()
        if self._ranks is not None:
            self._ranks.barrier()

    def weight_loader(self, decay: float) -> WeightLoader | None:
        """See ``WeightTakingTrainer``; None for a model that keeps a tensor in another form than its checkpoint."""
        layout = self._checkpoint_layout()
        if not takes_tensors(layout):
            return None

        def model() -> PreTrainedModel:
            packed = self._ready("weights", "optimizer", may_be_broken=decay == 0.0)  # an average needs intact weights
            free_gathered(packed)
            return packed.model

        def taken() -> None:
            self._start_anew()
            self._broken = None

        def break_down(why: str) -> None:
            self._break_weights(why)

        hooks = LoadingHooks(model, taken, break_down)
        return ShardedWeightLoader(self._name, layout, decay, hooks)

    def export_model(self, directory: Path) -> None:
        model = self._ready("weights")
        export_model(model.model, self._checkpoint_layout(), self._source, directory, self.context.rank)
        if self._ranks is not None:
            self._ranks.barrier()

    def manifest(self, payload: Payload = "full") -> WeightManifest:
        if payload == "adapter":
            return adapter_manifest(self._ready().model, self._adapter_settings())
        return self._checkpoint_layout().manifest()

    def weights(self, export: Export = "full_tensors", payload: Payload = "full") -> Iterator[WeightShard]:
        """Stream the weights under checkpoint names, tied ones once. Collective.

        ``full_tensors``: every rank gathers every tensor in the same order and yields it whole; the owner, which sends
        it, changes from tensor to tensor so that all ranks own about as many bytes. ``boxes``: every rank yields its
        own part, without communication (except that the small A of adapters is gathered). Payload ``adapter``: the
        whole adapters, owned by rank 0.
        """
        model = self._ready("weights")
        if payload == "adapter":
            self._adapter_settings()
            return stream_adapter(model.model)
        layout = self._checkpoint_layout()
        if export == "boxes":
            return stream_boxes(model.model, layout, self.context.rank)
        return stream_full(model.model, layout, self.context.world_size)

    # Internal methods

    def _wait_for_writer(self) -> None:
        if self._writer is not None:
            self._writer.wait()

    def _start_anew(self) -> None:
        """Optimizer and adapters as if training began here."""
        self._updates = 0
        if self._optimizer is not None:
            self._optimizer.state.clear()
        draw_new_adapters(self._ready(may_be_broken=True).model, self.options, self.context)

    def _check_forward(self, model: PackedModel) -> None:
        """Choose how to compute sequences, by comparison with the model's own forward passes.

        Raises:
            ModelError: no way that the options allow is correct.
        """
        self.choice = choose_forward(
            model,
            self._source,
            self.context,
            attention=self.options.attention,
            sequences=self.options.sequences,
            dtype=self._compute_dtype,
            autocast=self._autocast,
            sharing=self._sharing,
            agree=self._max_over_ranks,
        )
        free_gathered(model)

    def _adapter_settings(self) -> LoraSettings:
        if self.options.lora is None:
            raise BackendError(
                f"trainer role {self.context.role!r}: payload 'adapter' was requested, but the role trains the weights"
                " themselves; set options.lora, or weight_sync.payload: full"
            )
        return LoraSettings.of(self.options.lora)

    def _checkpoint_layout(self) -> CheckpointLayout:
        if self._layout is None:
            raise BackendError(f"trainer role {self.context.role!r} is not set up, or was closed")
        return self._layout

    def _trainable(self, model: PackedModel) -> list[torch.nn.Parameter]:
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    def _grad_norm(self, model: PackedModel) -> Tensor:
        """Return the norm of the trainable parameters' gradients, over all ranks."""
        return gradient_norm(self._gradients(model), self._ranks, self.context.rank, self._device)

    def _gradients(self, model: PackedModel) -> list[Tensor]:
        return [parameter.grad for parameter in self._trainable(model) if parameter.grad is not None]

    def _all_tensors(self, part: MemoryPart) -> Iterable[Tensor]:
        if self._model is None:
            return []
        if part == "weights":
            return [*self._model.parameters(), *self._model.buffers()]
        if part == "gradients":
            return [p.grad for p in self._model.parameters() if p.grad is not None]
        if self._optimizer is None or part != "optimizer":
            return []
        state = optimizer_tensors(self._optimizer, self._model)
        return [tensor for entry in state.values() for tensor in entry.values()]

    def _state(self, model: PackedModel) -> checkpoint.TrainerState:
        return checkpoint.TrainerState(
            model=model.model,
            layout=self._checkpoint_layout(),
            optimizer=self._optimizer,
            head=self._source.head,
            updates=self._updates,
            device=self._device,
            ranks=self._ranks if self.context.world_size > 1 else None,
            rank=self.context.rank,
            lora=self.options.lora,
        )

    @property
    def _sharing(self) -> TokenGroup | None:
        return self._ranks.sharing if self._ranks is not None else None

    def _rows(self, model: PackedModel) -> tuple[bool, bool]:
        return model.takes_shared_rows, model.rows == "padded"

    def _with_layouts(self, cut: MicroBatches) -> Iterator[tuple[TrainBatch, PackedLayout]]:
        """Yield each micro-batch on the device, with its layout."""
        for micro, rows in cut.on(self._device):
            yield micro, PackedLayout(micro.lengths, self._device, self._sharing, rows)

    def _autocast(self) -> AbstractContextManager[object]:
        # Sharded modules cast by their own precision policy.
        if self._ranks is not None or self._compute_dtype == self._master_dtype:
            return nullcontext()
        return torch.autocast(self._device.type, self._compute_dtype)

    def _forward(self, model: PackedModel, micro: TrainBatch, layout: PackedLayout, request: OutputRequest) -> Outputs:
        with self._autocast():
            return requested_outputs(model, micro, layout, request)

    def _start_training(self, model: PackedModel) -> None:
        start_training(model, noise=self.options.dropout)

    def _backward(self, model: PackedModel, total: Tensor, *, is_last: bool) -> None:
        options = self.options
        prepare_backward(model, gathers_once=options.gathers_once, reduces_once=options.reduces_once, is_last=is_last)
        total.backward()  # type: ignore[no-untyped-call]  # torch
        if is_last and self._ranks is not None and self._ranks.tensor_mesh is not None:
            reduce_copies(model, decoder_layers(model.model), self._ranks.tensor_mesh)

    def _step(self, model: PackedModel, rate: float, norm: Tensor) -> None:
        optimizer = self._require_optimizer()
        set_learning_rate(optimizer, rate)
        if self.options.grad_clip is not None:
            clip_gradients(self._gradients(model), self.options.grad_clip, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _drop_gradients(self, model: PackedModel) -> None:
        model.zero_grad(set_to_none=True)

    def _settle_weights(self, model: PackedModel) -> None:
        free_gathered(model)
