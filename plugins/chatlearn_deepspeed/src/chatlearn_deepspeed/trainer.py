"""The trainer ``deepspeed``, one object per rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from chatlearn_core.exceptions import BackendError
from chatlearn_core.plugins.records import Export
from chatlearn_core.protocols import MemoryPart, RoleContext, WeightLoader
from chatlearn_core.types import FileFacts, OutputRequest, Outputs, Payload, TrainBatch, WeightManifest, WeightShard
from chatlearn_deepspeed import checkpoint
from chatlearn_deepspeed.engine_arguments import native_configuration
from chatlearn_deepspeed.fragments import Fragment, without_adapters, write_whole
from chatlearn_deepspeed.library import load_deepspeed
from chatlearn_deepspeed.model_start import new_adapters, start_model, stored_tensors
from chatlearn_deepspeed.options import DeepSpeedOptions
from chatlearn_deepspeed.ranks import ZeroRanks, check_ranks, join_ranks
from chatlearn_deepspeed.weight_loader import FragmentWeightLoader, LoadingHooks
from chatlearn_deepspeed.weight_stream import stream_adapter, stream_boxes, whole_tensors
from chatlearn_deepspeed.zero import ZeroModel, configuration
from chatlearn_hf.checkpoint_names import CheckpointLayout, StateTensor, takes_tensors
from chatlearn_hf.forward_check import Choice, choose_forward
from chatlearn_hf.packed_forward import PackedModel, requested_outputs
from chatlearn_hf.token_group import TokenGroup
from chatlearn_hf.training_noise import start_training
from chatlearn_hf.varlen_attention import PackedLayout
from chatlearn_hf.weight_export import spread_over_ranks, write_model_directory
from chatlearn_trainer_kit.micro_batch_trainer import MicroBatchTrainer
from chatlearn_trainer_kit.micro_batching import MicroBatches
from chatlearn_trainer_kit.optimizer import build_optimizer

MIB = 1 << 20


class DeepSpeedTrainer(MicroBatchTrainer[PackedModel, PackedLayout]):
    """Implements ``chatlearn_core.protocols.Trainer`` with DeepSpeed's ZeRO over ``context.rendezvous``.

    Every rank takes its own slice of a batch; ranks that share rows share a slice.
    """

    options: DeepSpeedOptions
    _ranks: ZeroRanks | None

    def __init__(self, options: DeepSpeedOptions, context: RoleContext) -> None:
        super().__init__(options, context)
        self._native = native_configuration(context.role, options.config_file, context.engine_arguments)
        check_ranks(options, context)
        self._zero: ZeroModel | None = None
        self._layout: CheckpointLayout | None = None
        self._adapter_manifest: WeightManifest | None = None
        self.choice: Choice | None = None
        """The chosen way to compute sequences, with the reasons against earlier ways; None before ``setup``."""

    # Lifecycle

    def setup(self) -> None:
        """Load the model, shard it over the ranks, and create the optimizer."""
        options, context = self.options, self.context
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        self._use_device()
        deepspeed = load_deepspeed(self._device, build_ops=options.build_ops)
        torch.manual_seed(context.seed + context.rank)
        self._ranks = join_ranks(options, context)
        started = start_model(options, context, self._source)
        packed, self._layout, self._adapter_manifest = started.packed, started.layout, started.adapter_manifest
        # Its groups depend on the shapes of parameters, which ZeRO-3 hides.
        self._optimizer = build_optimizer(packed, options) if context.trainable else None
        num_elements = sum(parameter.numel() for parameter in packed.parameters())
        self._zero = ZeroModel(
            deepspeed,
            packed,
            self._optimizer,
            configuration(deepspeed, options, self._native, context.role, num_elements=num_elements),
            num_ranks=context.world_size,
            rank=context.rank,
        )
        self._model = packed
        self.choice = choose_forward(
            packed,
            self._source,
            context,
            attention=options.attention,
            sequences=options.sequences,
            dtype=getattr(torch, options.param_dtype),
            autocast=self._zero.head_gathered,
            sharing=self._sharing,
            agree=self._max_over_ranks,
            num_elements=num_elements,
        )
        self._settle_weights(packed)

    def close(self) -> None:
        zero, self._zero = self._zero, None
        if zero is not None:
            zero.close()
        self._model = None
        self._optimizer = None
        self._layout = None
        self._parts.discard()
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    # Trainer

    def save(self, directory: Path) -> Mapping[str, FileFacts]:
        self._ready("weights", "optimizer")
        return checkpoint.save(directory, self._state())

    def load(self, directory: Path) -> None:
        self._ready("weights", "optimizer", may_be_broken=True)
        state = self._state()
        with self._guarding_weights(f"loading {directory}"):
            checkpoint.load(directory, state)
        self._updates = state.updates

    def load_model(self, directory: Path, *, fresh_optimizer: bool = True, decay: float = 0.0) -> None:
        self._ready("weights", "optimizer", may_be_broken=True)
        zero, source = self._sharded(), replace(self._source, path=str(directory))
        with self._guarding_weights(f"loading the model {directory}"):
            fragments = without_adapters(zero.fragments())
            for key, tensor in stored_tensors(self._checkpoint_layout(), source, self.context.seed):
                write_whole(fragments[key], tensor, decay)
            if fresh_optimizer:
                self._start_anew()
            zero.refresh()

    def weight_loader(self, decay: float) -> WeightLoader | None:
        """See ``WeightTakingTrainer``; None for a model that keeps a tensor in another form than its checkpoint, and
        for an average of bfloat16 weights that are trained, because other ranks hold their float32 values.
        """
        layout = self._checkpoint_layout()
        rounds = decay > 0 and self._optimizer is not None and self.options.param_dtype != "float32"
        if rounds or not takes_tensors(layout):
            return None

        def fragments() -> dict[str, Fragment]:
            packed = self._ready("weights", "optimizer", may_be_broken=decay == 0.0)  # an average needs intact weights
            self._settle_weights(packed)
            return without_adapters(self._sharded().fragments())

        def taken() -> None:
            self._start_anew()
            self._broken = None

        def break_down(why: str) -> None:
            self._break_weights(why)

        return FragmentWeightLoader(self._name, layout, decay, LoadingHooks(fragments, taken, break_down))

    def export_model(self, directory: Path) -> None:
        model = self._ready("weights")
        write_model_directory(model.model, self._whole_tensors(), self._source, directory, self.context.rank)
        assert self._ranks is not None, "set up"
        self._ranks.barrier()

    def manifest(self, payload: Payload = "full") -> WeightManifest:
        if payload == "adapter":
            return self._adapters()
        return self._checkpoint_layout().manifest()

    def weights(self, export: Export = "full_tensors", payload: Payload = "full") -> Iterator[WeightShard]:
        """Stream the weights under checkpoint names, tied ones once. Collective.

        Every rank yields every tensor whole, in the same order; the owner, which sends it, changes from tensor to
        tensor so that all ranks own about as many bytes. ZeRO-3 gathers ``export_bucket_mib`` at a time. Payload
        ``adapter``: the whole adapters, owned by rank 0. ``boxes``: see ``stream_boxes``.
        """
        model = self._ready("weights")
        if payload == "adapter":
            self._adapters()
            return stream_adapter(self._sharded())
        if export == "boxes":
            zero = self._sharded()
            zero.free_gathered()
            return stream_boxes(zero, self._checkpoint_layout(), self.context.rank, self.context.world_size)
        return spread_over_ranks(model.model, self._whole_tensors(), self.context.world_size)

    # Internal methods

    def _sharded(self) -> ZeroModel:
        if self._zero is None:
            raise BackendError(f"trainer role {self.context.role!r} is not set up, or was closed")
        return self._zero

    def _whole_tensors(self) -> Iterator[tuple[StateTensor, Tensor]]:
        return whole_tensors(self._sharded(), self._checkpoint_layout(), self.options.export_bucket_mib * MIB)

    def _start_anew(self) -> None:
        """Optimizer and adapters as if training began here."""
        self._updates = 0
        zero = self._sharded()
        zero.clear_moments()
        if self.options.lora is None:
            return
        model, fragments = zero.packed.model, zero.fragments()
        names = [name for name in fragments if ".lora_A." in name or ".lora_B." in name]
        with zero.gathered([zero.parameters()[name] for name in names]):
            drawn = new_adapters(model, self.context.seed)
        fragments = zero.fragments()
        for name, values in drawn.items():
            write_whole(fragments[name], values)

    def _adapters(self) -> WeightManifest:
        if self._adapter_manifest is None:
            raise BackendError(
                f"trainer role {self.context.role!r}: payload 'adapter' was requested, but the role trains the weights"
                " themselves; set options.lora, or weight_sync.payload: full"
            )
        return self._adapter_manifest

    def _checkpoint_layout(self) -> CheckpointLayout:
        if self._layout is None:
            raise BackendError(f"trainer role {self.context.role!r} is not set up, or was closed")
        return self._layout

    def _state(self) -> checkpoint.TrainerState:
        assert self._ranks is not None, "set up"
        return checkpoint.TrainerState(
            zero=self._sharded(),
            layout=self._checkpoint_layout(),
            head=self._source.head,
            updates=self._updates,
            device=self._device,
            ranks=self._ranks,
            rank=self.context.rank,
            lora=self.options.lora,
        )

    @property
    def _sharing(self) -> TokenGroup | None:
        return self._ranks.sharing if self._ranks is not None else None

    # What MicroBatchTrainer asks for

    def _rows(self, model: PackedModel) -> tuple[bool, bool]:
        return model.takes_shared_rows, model.rows == "padded"

    def _with_layouts(self, cut: MicroBatches) -> Iterator[tuple[TrainBatch, PackedLayout]]:
        for micro, rows in cut.on(self._device):
            yield micro, PackedLayout(micro.lengths, self._device, self._sharing, rows)

    def _forward(self, model: PackedModel, micro: TrainBatch, layout: PackedLayout, request: OutputRequest) -> Outputs:
        return requested_outputs(self._sharded().module, micro, layout, request)

    def _start_training(self, model: PackedModel) -> None:
        start_training(model, noise=self.options.dropout)

    def _backward(self, model: PackedModel, total: Tensor, *, is_last: bool) -> None:
        self._sharded().backward(total, is_last=is_last)

    def _grad_norm(self, model: PackedModel) -> Tensor:
        return self._sharded().grad_norm()

    def _step(self, model: PackedModel, rate: float, norm: Tensor) -> None:
        self._sharded().step(rate)

    def _drop_gradients(self, model: PackedModel) -> None:
        self._sharded().drop_gradients()

    def _settle_weights(self, model: PackedModel) -> None:
        self._sharded().free_gathered()

    def _all_tensors(self, part: MemoryPart) -> Iterable[Tensor]:
        if self._zero is None:
            return ()
        if part == "weights":
            return self._zero.weight_tensors()
        if part == "gradients":
            return self._zero.gradient_tensors()
        return self._zero.optimizer_tensors() if part == "optimizer" else ()
