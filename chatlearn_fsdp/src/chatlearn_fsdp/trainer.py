"""The trainer ``fsdp``, one object per rank: a plain model in one process, FSDP2 over several."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from chatlearn_core.exceptions import BackendError, ConfigError, ModelError
from chatlearn_core.plugins.records import Export
from chatlearn_core.protocols import Loss, MemoryPart, ModelSource, RoleContext, WeightLoader
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
from chatlearn_fsdp import checkpoint
from chatlearn_fsdp.engine_arguments import check_engine_arguments
from chatlearn_fsdp.model_start import draw_new_adapters, lora_settings, read_model, start_model
from chatlearn_fsdp.options import FSDPOptions
from chatlearn_fsdp.sharding import RankGroup, free_gathered, join_ranks, mesh_sizes, whole
from chatlearn_fsdp.shards import takes_tensors
from chatlearn_fsdp.weight_loader import LoadingHooks, ShardedWeightLoader
from chatlearn_fsdp.weight_stream import adapter_manifest, export_model, stream_adapter, stream_boxes, stream_full
from chatlearn_hf.checkpoint_names import CheckpointLayout
from chatlearn_hf.forward_check import Choice, ForwardCheck
from chatlearn_hf.lora import LoraSettings
from chatlearn_hf.packed_forward import PackedModel, requested_outputs
from chatlearn_hf.training_noise import start_training
from chatlearn_hf.ulysses import UlyssesGroup
from chatlearn_hf.varlen_attention import PackedLayout
from chatlearn_trainer_kit.finite_updates import all_finite, refused_update
from chatlearn_trainer_kit.micro_batching import MicroBatches
from chatlearn_trainer_kit.offload import OffloadedParts, live_bytes
from chatlearn_trainer_kit.optimizer import build_optimizer, optimizer_tensors, set_learning_rate
from chatlearn_trainer_kit.schedule import check_schedule, learning_rate
from chatlearn_trainer_kit.timing import PhaseTimer

logger = logging.getLogger(__name__)

HELD_PARTS: tuple[MemoryPart, ...] = ("weights", "gradients", "optimizer")


class FSDPTrainer:
    """Implements ``chatlearn_core.protocols.Trainer``.

    With one rank there is no process group and the model is a plain module. With several ranks, FSDP2 shards
    parameters, gradients and optimizer state over ``context.rendezvous``, and every rank takes its own slice of a
    batch.
    """

    def __init__(self, options: FSDPOptions, context: RoleContext) -> None:
        if context.model is None:
            raise ConfigError(f"roles.{context.role}: a trainer needs a model; set its model.path")
        check_engine_arguments(context.role, context.engine_arguments)
        if context.trainable:
            check_schedule(options, context.total_updates, context.role)
        mesh_sizes(options, context)
        self.options = options
        self.context = context
        self._source: ModelSource = context.model
        self._device = torch.device(context.device)
        self._compute_dtype: torch.dtype = getattr(torch, options.param_dtype)
        self._master_dtype: torch.dtype = getattr(torch, options.master_dtype)
        self._ranks: RankGroup | None = None
        self._model: PackedModel | None = None
        self._layout: CheckpointLayout | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self.choice: Choice | None = None
        """The chosen way to compute sequences, with the reasons against earlier ways; None before ``setup``."""
        self._parts = OffloadedParts(HELD_PARTS, self._part_tensors)
        self._updates = 0
        self._broken: str | None = None
        """Why the weights match no completed step; None while they do."""

    # Lifecycle

    def setup(self) -> None:
        """Load the model, shard it over the ranks, and create the optimizer."""
        options, context = self.options, self.context
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        torch.manual_seed(context.seed + context.rank)
        if context.world_size > 1 or options.cpu_offload:
            self._ranks = join_ranks(options, context)
        started = start_model(options, context, self._source, self._ranks)
        self._layout, self._model = started.layout, started.packed
        self._check_forward(started.packed)
        if context.trainable:
            self._optimizer = build_optimizer(started.packed, options)

    def health(self) -> str | None:
        if self._model is None:
            return "not set up, or closed"
        return self._broken

    def offload(self, parts: Collection[MemoryPart]) -> None:
        if self._model is not None:
            free_gathered(self._model)
        self._parts.offload(parts)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # free torch's cached memory for other processes on the device

    def onload(self, parts: Collection[MemoryPart]) -> None:
        self._parts.onload(parts)

    def live_bytes(self, part: MemoryPart) -> int:
        """Memory in bytes that a part occupies on the device now."""
        return live_bytes(self._part_tensors(part)) if self._model is not None else 0

    def close(self) -> None:
        self._model = None
        self._optimizer = None
        self._layout = None
        self._parts.discard()
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    # Trainer

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's batch slice; the ranks of one Ulysses group share a slice."""
        return self.context.rank // self.options.ulysses

    @property
    def data_parallel_size(self) -> int:
        return self.context.world_size // self.options.ulysses

    @property
    def num_updates(self) -> int:
        """Number of optimizer steps so far, including those before a resume."""
        return self._updates

    def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """See the protocol. Per-token outputs are [T] (``hidden_states`` [T, H]), ``scores`` [S].

        All ranks of one Ulysses group return the same outputs.
        """
        model = self._ready("weights")
        model.eval()
        cut = self._cut(model, batch)
        pieces: list[Outputs] = []
        with torch.no_grad():
            for micro, layout in self._with_layouts(cut):
                outputs = self._forward(model, micro, layout, request)
                pieces.append({name: tensor.detach().to("cpu") for name, tensor in outputs.items()})
        free_gathered(model)
        return cut.in_batch_order(pieces)

    def update(self, batch: TrainBatch, loss: Loss) -> Metrics:
        """See the protocol. Adds ``timing_s/forward|backward|optimizer`` and
        ``perf/micro_batches|tokens|computed_tokens``.

        ``computed_tokens`` counts a shared prompt once. Of the ranks that share a slice (Ulysses) only the first
        returns metrics, so that metrics can be merged over all ranks.
        """
        model = self._ready("weights", "gradients", "optimizer")
        optimizer = self._require_optimizer()
        start_training(model, noise=self.options.dropout)
        timer = PhaseTimer(self._device)
        cut = self._cut(model, batch)
        totals: list[Tensor] = []
        parts: list[Metrics] = []
        for micro, layout in self._with_layouts(cut):
            result_total, metrics = self._accumulate(model, micro, layout, loss, timer)
            totals.append(result_total)
            parts.append(metrics)
        with timer.phase("optimizer"):
            norm = self._grad_norm(model)
            values = torch.stack([*totals, norm.to(totals[0].device, totals[0].dtype)]).tolist()
        grad_norm = values.pop()
        if not all_finite([*values, grad_norm], self._all_agree):
            raise self._refused(model, cut, loss, values, grad_norm)
        with timer.phase("optimizer"), self._guarding_weights(f"optimizer step {self._updates}"):
            rate = learning_rate(self.options, self._updates, self.context.total_updates)
            set_learning_rate(optimizer, rate)
            if self.options.grad_clip is not None:
                torch.nn.utils.clip_grads_with_norm_(self._trainable(model), self.options.grad_clip, norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._updates += 1
        if self._ranks is not None and not self._ranks.leads_slice:
            return {}
        own: Metrics = {
            "loss": Metric(math.fsum(values), 1.0, "sum"),
            "perf/micro_batches": Metric(float(cut.num_filled), 1.0, "sum"),
            "perf/tokens": Metric(float(batch.num_tokens), 1.0, "sum"),
            "perf/computed_tokens": Metric(float(cut.num_computed_tokens), 1.0, "sum"),
        }
        if self.data_parallel_rank == 0:
            own |= {"grad_norm": Metric(grad_norm), "lr": Metric(rate)} | timer.metrics()
        return merge_metrics(*parts) | own

    def save(self, directory: Path) -> Mapping[str, FileFacts]:
        model = self._ready("weights", "optimizer")
        return checkpoint.save(directory, self._state(model))

    def load(self, directory: Path) -> None:
        model = self._ready("weights", "optimizer", may_be_broken=True)
        state = self._state(model)
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
            self._broken = f"{why}, so its weights may match no completed step"

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

    def _start_anew(self) -> None:
        """Optimizer and adapters as if training began here."""
        self._updates = 0
        if self._optimizer is not None:
            self._optimizer.state.clear()
        draw_new_adapters(self._ready(may_be_broken=True).model, self.options, self.context)

    @property
    def _name(self) -> str:
        """Role and rank, for messages."""
        return f"trainer role {self.context.role!r} rank {self.context.rank}"

    def _check_forward(self, model: PackedModel) -> None:
        """Choose how to compute sequences, by comparison with the model's own forward passes.

        Raises:
            ModelError: no way that the options allow is correct.
        """
        check = ForwardCheck(
            model,
            device=self._device,
            dtype=self._compute_dtype,
            autocast=self._autocast,
            ulysses=self._ulysses,
            max_length=self._source.max_length,
            agree=self._max_over_ranks,
        )
        try:
            self.choice = check.choose(self.options.attention, self.options.sequences)
        except ModelError as error:
            raise ModelError(f"roles.{self.context.role} ({self._source.path}): {error}") from error
        free_gathered(model)
        note = self.choice.note(str(model.model.config.model_type))
        if note is not None and self.context.rank == 0:
            logger.warning("Role %s: %s", self.context.role, note)

    def _max_over_ranks(self, finding: float) -> float:
        """Return the largest value of all ranks; infinite if one is not finite."""
        finding = finding if math.isfinite(finding) else math.inf
        if self._ranks is None or self._ranks.size == 1:
            return finding
        return float(self._ranks.all_reduce(torch.tensor(finding, device=self._device), dist.ReduceOp.MAX))

    def _adapter_settings(self) -> LoraSettings:
        if self.options.lora is None:
            raise BackendError(
                f"trainer role {self.context.role!r}: payload 'adapter' was requested, but the role trains the weights"
                " themselves; set options.lora, or weight_sync.payload: full"
            )
        return lora_settings(self.options.lora)

    @contextmanager
    def _guarding_weights(self, what: str) -> Iterator[None]:
        """Mark the weights as broken if the block fails, because part of them may have changed; loading
        repairs them.
        """
        try:
            yield
        except ModelError:
            raise  # found before the first weight was written
        except BaseException as error:
            self._broken = f"{what} failed midway ({type(error).__name__}), so its weights may match no completed step"
            raise
        self._broken = None

    def _ready(self, *parts: MemoryPart, may_be_broken: bool = False) -> PackedModel:
        if self._model is None:
            raise BackendError(f"trainer role {self.context.role!r} is not set up, or was closed")
        if self._broken is not None and not may_be_broken:
            raise BackendError(f"{self._name} cannot work: {self._broken}; load a checkpoint")
        self._parts.require(self._name, parts)
        return self._model

    def _require_optimizer(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise BackendError(
                f"trainer role {self.context.role!r} does not learn (the algorithm has no loss for it), so it has no"
                " optimizer and cannot update"
            )
        return self._optimizer

    def _checkpoint_layout(self) -> CheckpointLayout:
        if self._layout is None:
            raise BackendError(f"trainer role {self.context.role!r} is not set up, or was closed")
        return self._layout

    def _trainable(self, model: PackedModel) -> list[torch.nn.Parameter]:
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    def _grad_norm(self, model: PackedModel) -> Tensor:
        """Return the norm of the trainable parameters' gradients, over all ranks."""
        return whole(torch.nn.utils.get_total_norm([p.grad for p in self._trainable(model) if p.grad is not None]))

    def _part_tensors(self, part: MemoryPart) -> list[Tensor]:
        """Return the tensors of a part on the device, without those that ``cpu_offload`` keeps on the host."""
        return [tensor for tensor in self._all_tensors(part) if tensor.device.type == self._device.type]

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
    def _ulysses(self) -> UlyssesGroup | None:
        return self._ranks.ulysses if self._ranks is not None else None

    def _cut(self, model: PackedModel, batch: TrainBatch) -> MicroBatches:
        options = self.options
        return MicroBatches(
            batch,
            options.max_tokens_per_micro_batch,
            # Ulysses splits a row by its tokens.
            share_prompts=options.share_prompts and model.takes_shared_rows and options.ulysses == 1,
            padded=model.rows == "padded",
            agree=self._max_count if self._ranks is not None and self._ranks.size > 1 else None,
        )

    def _with_layouts(self, cut: MicroBatches) -> Iterator[tuple[TrainBatch, PackedLayout]]:
        """Yield each micro-batch on the device, with its layout."""
        for micro, rows in cut.on(self._device):
            yield micro, PackedLayout(micro.lengths, self._device, self._ulysses, rows)

    def _max_count(self, count: int) -> int:
        """Return the largest count of all ranks."""
        assert self._ranks is not None, "only several ranks reduce counts"
        return int(self._ranks.all_reduce(torch.tensor(count, device=self._device), dist.ReduceOp.MAX))

    def _autocast(self) -> AbstractContextManager[object]:
        # Sharded modules cast by their own precision policy.
        if self._ranks is not None or self._compute_dtype == self._master_dtype:
            return nullcontext()
        return torch.autocast(self._device.type, self._compute_dtype)

    def _forward(self, model: PackedModel, micro: TrainBatch, layout: PackedLayout, request: OutputRequest) -> Outputs:
        with self._autocast():
            return requested_outputs(model, micro, layout, request)

    def _accumulate(
        self, model: PackedModel, micro: TrainBatch, layout: PackedLayout, loss: Loss, timer: PhaseTimer
    ) -> tuple[Tensor, Metrics]:
        """Run forward and backward of one micro-batch. Returns its detached loss and the loss's metrics."""
        with timer.phase("forward"):
            outputs = self._forward(model, micro, layout, loss.needs)
        # The loss computation counts as the algorithm's time, not the model's.
        result = loss(outputs, micro)
        total = result.total
        if not total.requires_grad:
            # The loss is constant (an empty micro-batch, or everything masked). The graph must still run, because other
            # ranks wait in its collectives.
            total = total + sum((output.sum() for output in outputs.values()), start=total.new_zeros(())) * 0.0
        with timer.phase("backward"):
            total.backward()  # type: ignore[no-untyped-call]  # torch
        return result.total.detach().float(), result.metrics

    def _all_agree(self, finding: bool) -> bool:
        """Whether the condition holds on every rank."""
        if self._ranks is None or self._ranks.size == 1:
            return finding
        flag = torch.tensor(int(finding), device=self._device)
        return bool(self._ranks.all_reduce(flag, dist.ReduceOp.MIN))

    def _refused(
        self, model: PackedModel, cut: MicroBatches, loss: Loss, losses: Sequence[float], grad_norm: float
    ) -> BackendError:
        """Drop the gradients, and recompute each micro-batch separately to find those that caused the failure."""
        timer = PhaseTimer(self._device)
        sample_ids: list[Sequence[str]] = []
        norms: list[float] = []
        for micro, layout in self._with_layouts(cut):
            model.zero_grad(set_to_none=True)
            self._accumulate(model, micro, layout, loss, timer)
            sample_ids.append(micro.sample_ids)
            norms.append(float(self._grad_norm(model)))
        model.zero_grad(set_to_none=True)
        alone = norms if self.data_parallel_size == 1 else None
        return refused_update(self._name, self._updates, losses, grad_norm, sample_ids, alone)
