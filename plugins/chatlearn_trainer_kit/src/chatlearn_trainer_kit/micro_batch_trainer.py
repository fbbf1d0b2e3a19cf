"""What trainers of packed micro-batches share: computing outputs, the update, offloading, and their errors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols import Loss, RoleContext
from chatlearn_core.types import Metrics, OutputRequest, Outputs, TrainBatch
from chatlearn_trainer_kit.finite_updates import all_finite, refused_update
from chatlearn_trainer_kit.micro_batching import MicroBatches
from chatlearn_trainer_kit.options import PackedTrainerOptions
from chatlearn_trainer_kit.rank_trainer import RankTrainer
from chatlearn_trainer_kit.schedule import learning_rate
from chatlearn_trainer_kit.timing import PhaseTimer

ModelT = TypeVar("ModelT", bound=nn.Module)
LayoutT = TypeVar("LayoutT")


class MicroBatchTrainer(RankTrainer[ModelT, torch.optim.Optimizer], Generic[ModelT, LayoutT]):
    """One rank of a trainer; a backend supplies the model, its forward and backward passes and its optimizer.

    Every loss is a part of a global sum, so gradients are *summed* over micro-batches and ranks.
    """

    def __init__(self, options: PackedTrainerOptions, context: RoleContext) -> None:
        super().__init__(options, context)
        self.options = options

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

    # Trainer

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's batch slice, which several ranks may share."""
        return self.context.rank // self.options.ranks_per_slice

    @property
    def data_parallel_size(self) -> int:
        """Number of batch slices."""
        return self.context.world_size // self.options.ranks_per_slice

    def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """See the protocol. Per-token outputs are [T] (``hidden_states`` [T, H]), ``scores`` [S].

        All ranks that share a slice return the same outputs.
        """
        model = self._ready("weights")
        model.eval()
        cut = self._cut(model, batch)
        pieces: list[Outputs] = []
        with torch.no_grad():
            for micro, layout in self._with_layouts(cut):
                outputs = self._forward(model, micro, layout, request)
                pieces.append({name: tensor.detach().to("cpu") for name, tensor in outputs.items()})
        self._settle_weights(model)
        return cut.in_batch_order(pieces)

    def update(self, batch: TrainBatch, loss: Loss) -> Metrics:
        """See the protocol. Adds ``timing_s/forward|backward|optimizer`` and
        ``perf/micro_batches|tokens|computed_tokens``.

        ``computed_tokens`` counts a shared prompt once. Of the ranks that share a slice only the first
        returns metrics, so that metrics can be merged over all ranks.
        """
        model = self._ready("weights", "gradients", "optimizer")
        self._require_optimizer()
        self._start_training(model)
        timer = PhaseTimer(self._device)
        cut = self._cut(model, batch)
        totals: list[Tensor] = []
        parts: list[Metrics] = []
        try:
            for number, (micro, layout) in enumerate(self._with_layouts(cut), start=1):
                total, metrics = self._accumulate(model, micro, layout, loss, timer, is_last=number == len(cut))
                totals.append(total)
                parts.append(metrics)
        except BaseException:
            self._drop_gradients(model)  # of the micro-batches before the failure; the next update must not add them
            raise
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
        return self._metrics(cut, values, grad_norm, rate, parts, timer.metrics())

    # What backends call

    def _cut(self, model: ModelT, batch: TrainBatch) -> MicroBatches:
        """Split this rank's batch into as many micro-batches as every other rank has."""
        options = self.options
        shares_rows, is_padded = self._rows(model)
        return MicroBatches(
            batch,
            options.max_tokens_per_micro_batch,
            # Ranks that share a row divide its tokens.
            share_prompts=options.share_prompts and shares_rows and options.ranks_per_row == 1,
            padded=is_padded,
            agree=self._max_count if self._ranks is not None and self._ranks.size > 1 else None,
        )

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
