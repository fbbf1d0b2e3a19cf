"""What trainers of packed micro-batches share: computing outputs, the update, offloading, and their errors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from chatlearn_core.exceptions import BackendError, ConfigError, ModelError
from chatlearn_core.protocols import Loss, MemoryPart, ModelSource, RoleContext
from chatlearn_core.types import Metric, Metrics, OutputRequest, Outputs, TrainBatch, merge_metrics
from chatlearn_trainer_kit.finite_updates import all_finite, refused_update
from chatlearn_trainer_kit.micro_batching import MicroBatches
from chatlearn_trainer_kit.offload import OffloadedParts, live_bytes
from chatlearn_trainer_kit.options import PackedTrainerOptions
from chatlearn_trainer_kit.schedule import check_schedule, learning_rate
from chatlearn_trainer_kit.timing import PhaseTimer

HELD_PARTS: tuple[MemoryPart, ...] = ("weights", "gradients", "optimizer")

ModelT = TypeVar("ModelT", bound=nn.Module)
LayoutT = TypeVar("LayoutT")


class TrainerRanks(Protocol):
    """The ranks of one trainer, as far as an update needs them."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def leads_slice(self) -> bool:
        """Whether this rank is the first of the ranks that share a batch slice."""

    def all_reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce over all ranks, in place."""

    def barrier(self) -> None:
        """Wait for every rank."""


class MicroBatchTrainer(ABC, Generic[ModelT, LayoutT]):
    """One rank of a trainer; a backend supplies the model, its forward and backward passes and its optimizer.

    Every loss is a part of a global sum, so gradients are *summed* over micro-batches and ranks.
    """

    def __init__(self, options: PackedTrainerOptions, context: RoleContext) -> None:
        if context.model is None:
            raise ConfigError(f"roles.{context.role}: a trainer needs a model; set its model.path")
        if context.trainable:
            check_schedule(options, context.total_updates, context.role)
        self.options = options
        self.context = context
        self._source: ModelSource = context.model
        self._device = torch.device(context.device)
        self._ranks: TrainerRanks | None = None
        self._model: ModelT | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._parts = OffloadedParts(HELD_PARTS, self._part_tensors)
        self._updates = 0
        self._broken: str | None = None
        """Why the weights match no completed step; None while they do."""

    # What a backend does in its own way

    @abstractmethod
    def _rows(self, model: ModelT) -> tuple[bool, bool]:
        """Return whether sequences may share the rows of equal prompts, and whether each is padded to its own row."""

    @abstractmethod
    def _with_layouts(self, cut: MicroBatches) -> Iterator[tuple[TrainBatch, LayoutT]]:
        """Yield each micro-batch on the device, with its layout."""

    @abstractmethod
    def _forward(self, model: ModelT, micro: TrainBatch, layout: LayoutT, request: OutputRequest) -> Outputs:
        """Compute the outputs of one micro-batch."""

    @abstractmethod
    def _start_training(self, model: ModelT) -> None:
        """Put the model into the mode for an update."""

    @abstractmethod
    def _backward(self, model: ModelT, total: Tensor, *, is_last: bool) -> None:
        """Add the gradients of one micro-batch.

        Args:
            model: the model.
            total: scalar, the micro-batch's part of the global sum.
            is_last: whether the optimizer step follows.
        """

    @abstractmethod
    def _grad_norm(self, model: ModelT) -> Tensor:
        """Return the norm of the trainable parameters' gradients, over all ranks; not finite if a gradient is not."""

    @abstractmethod
    def _step(self, model: ModelT, rate: float, norm: Tensor) -> None:
        """Clip the gradients, whose norm is ``norm``, update the weights with this learning rate, drop gradients."""

    @abstractmethod
    def _drop_gradients(self, model: ModelT) -> None:
        """Forget all gradients."""

    @abstractmethod
    def _all_tensors(self, part: MemoryPart) -> Iterable[Tensor]:
        """Return the tensors of a part; none before ``setup``."""

    def _free_gathered(self, model: ModelT) -> None:
        """Free whole parameters that a forward pass left gathered; does nothing unless overridden."""

    # Lifecycle

    def health(self) -> str | None:
        """See the protocol."""
        if self._model is None:
            return "not set up, or closed"
        return self._broken

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """See the protocol."""
        if self._model is not None:
            self._free_gathered(self._model)
        self._parts.offload(parts)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # free torch's cached memory for other processes on the device

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """See the protocol."""
        self._parts.onload(parts)

    def live_bytes(self, part: MemoryPart) -> int:
        """Memory in bytes that a part occupies on the device now."""
        return live_bytes(self._part_tensors(part)) if self._model is not None else 0

    # Trainer

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's batch slice; the ranks of one Ulysses group share a slice."""
        return self.context.rank // self.options.ulysses

    @property
    def data_parallel_size(self) -> int:
        """Number of batch slices."""
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
        self._free_gathered(model)
        return cut.in_batch_order(pieces)

    def update(self, batch: TrainBatch, loss: Loss) -> Metrics:
        """See the protocol. Adds ``timing_s/forward|backward|optimizer`` and
        ``perf/micro_batches|tokens|computed_tokens``.

        ``computed_tokens`` counts a shared prompt once. Of the ranks that share a slice (Ulysses) only the first
        returns metrics, so that metrics can be merged over all ranks.
        """
        model = self._ready("weights", "gradients", "optimizer")
        self._require_optimizer()
        self._start_training(model)
        timer = PhaseTimer(self._device)
        cut = self._cut(model, batch)
        totals: list[Tensor] = []
        parts: list[Metrics] = []
        for number, (micro, layout) in enumerate(self._with_layouts(cut), start=1):
            total, metrics = self._accumulate(model, micro, layout, loss, timer, is_last=number == len(cut))
            totals.append(total)
            parts.append(metrics)
        with timer.phase("optimizer"):
            norm = self._grad_norm(model)
            values = torch.stack([*totals, norm.to(totals[0].device, totals[0].dtype)]).tolist()
        grad_norm = values.pop()
        if not all_finite([*values, grad_norm], self._all_agree):
            raise self._refused(model, cut, loss, values, grad_norm)
        with timer.phase("optimizer"), self._guarding_weights(f"optimizer step {self._updates}"):
            rate = learning_rate(self.options, self._updates, self.context.total_updates)
            self._step(model, rate, norm)
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

    # What backends call

    def _cut(self, model: ModelT, batch: TrainBatch) -> MicroBatches:
        """Split this rank's batch into as many micro-batches as every other rank has."""
        options = self.options
        shares_rows, is_padded = self._rows(model)
        return MicroBatches(
            batch,
            options.max_tokens_per_micro_batch,
            # Ulysses splits a row by its tokens.
            share_prompts=options.share_prompts and shares_rows and options.ulysses == 1,
            padded=is_padded,
            agree=self._max_count if self._ranks is not None and self._ranks.size > 1 else None,
        )

    @property
    def _name(self) -> str:
        """Role and rank, for messages."""
        return f"trainer role {self.context.role!r} rank {self.context.rank}"

    def _ready(self, *parts: MemoryPart, may_be_broken: bool = False) -> ModelT:
        """Return the model if it is set up, intact and has these parts on the device.

        Raises:
            BackendError: it is not.
        """
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

    def _max_over_ranks(self, finding: float) -> float:
        """Return the largest value of all ranks; infinite if one is not finite."""
        finding = finding if math.isfinite(finding) else math.inf
        if self._ranks is None or self._ranks.size == 1:
            return finding
        return float(self._ranks.all_reduce(torch.tensor(finding, device=self._device), dist.ReduceOp.MAX))

    def _max_count(self, count: int) -> int:
        """Return the largest count of all ranks."""
        if self._ranks is None or self._ranks.size == 1:
            return count
        return int(self._ranks.all_reduce(torch.tensor(count, device=self._device), dist.ReduceOp.MAX))

    def _all_agree(self, finding: bool) -> bool:
        """Whether the condition holds on every rank."""
        if self._ranks is None or self._ranks.size == 1:
            return finding
        flag = torch.tensor(int(finding), device=self._device)
        return bool(self._ranks.all_reduce(flag, dist.ReduceOp.MIN))

    def _part_tensors(self, part: MemoryPart) -> list[Tensor]:
        """Return the tensors of a part on the device, without those that stay on the host."""
        return [tensor for tensor in self._all_tensors(part) if tensor.device.type == self._device.type]

    def _accumulate(
        self,
        model: ModelT,
        micro: TrainBatch,
        layout: LayoutT,
        loss: Loss,
        timer: PhaseTimer,
        *,
        is_last: bool,
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
            self._backward(model, total, is_last=is_last)
        return result.total.detach().float(), result.metrics

    def _refused(
        self, model: ModelT, cut: MicroBatches, loss: Loss, losses: Sequence[float], grad_norm: float
    ) -> BackendError:
        """Drop the gradients, and recompute each micro-batch separately to find those that caused the failure."""
        timer = PhaseTimer(self._device)
        sample_ids: list[Sequence[str]] = []
        norms: list[float] = []
        for micro, layout in self._with_layouts(cut):
            self._drop_gradients(model)
            self._accumulate(model, micro, layout, loss, timer, is_last=True)
            sample_ids.append(micro.sample_ids)
            norms.append(float(self._grad_norm(model)))
        self._drop_gradients(model)
        alone = norms if self.data_parallel_size == 1 else None
        return refused_update(self._name, self._updates, losses, grad_norm, sample_ids, alone)
