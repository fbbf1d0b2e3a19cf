"""What every trainer that learns over ranks shares: its state, offloading, its guards, and what ranks agree on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from chatlearn_core.exceptions import BackendError, ConfigError, ModelError
from chatlearn_core.protocols import MemoryPart, ModelSource, RoleContext
from chatlearn_core.types import Metric, Metrics, TrainBatch, merge_metrics
from chatlearn_trainer_kit.micro_batching import MicroBatches
from chatlearn_trainer_kit.offload import OffloadedParts, live_bytes
from chatlearn_trainer_kit.options import OptimizerOptions
from chatlearn_trainer_kit.schedule import check_schedule

HELD_PARTS: tuple[MemoryPart, ...] = ("weights", "gradients", "optimizer")

ModelT = TypeVar("ModelT")
OptimizerT = TypeVar("OptimizerT")


class TrainerRanks(Protocol):
    """The ranks of one trainer, as far as an update needs them."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def leads_slice(self) -> bool:
        """Whether this rank reports the metrics of the ranks that share a batch slice."""

    def all_reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce over all ranks, in place."""

    def barrier(self) -> None:
        """Wait for every rank."""


class RankTrainer(ABC, Generic[ModelT, OptimizerT]):
    """One rank of a trainer: what holds whatever library computes the update."""

    def __init__(self, options: OptimizerOptions, context: RoleContext) -> None:
        if context.model is None:
            raise ConfigError(f"roles.{context.role}: a trainer needs a model; set its model.path")
        if context.trainable:
            check_schedule(options, context.total_updates, context.role)
        self.context = context
        self._source: ModelSource = context.model
        self._device = torch.device(context.device)
        self._ranks: TrainerRanks | None = None
        self._model: ModelT | None = None
        self._optimizer: OptimizerT | None = None
        self._parts = OffloadedParts(HELD_PARTS, self._part_tensors)
        self._updates = 0
        self._broken: str | None = None
        """Why the weights match no completed step; None while they do."""

    # What a backend does in its own way

    @property
    @abstractmethod
    def data_parallel_rank(self) -> int:
        """Index of this rank's batch slice."""

    @abstractmethod
    def _all_tensors(self, part: MemoryPart) -> Iterable[Tensor]:
        """Return the tensors of a part; none before ``setup``."""

    def _settle_weights(self, model: ModelT) -> None:
        """Free weights that a forward pass left gathered, and wait for those under way; does nothing unless
        overridden.
        """

    # Lifecycle

    def _use_device(self) -> None:
        """Make a CUDA device the current one: engines put on it what they place without naming a device. The device
        ``cuda`` becomes the one that is current now.
        """
        if self._device.type == "cuda":
            index = self._device.index
            self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
            torch.cuda.set_device(self._device)

    def health(self) -> str | None:
        """See the protocol."""
        if self._model is None:
            return "not set up, or closed"
        return self._broken

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """See the protocol."""
        if self._model is not None:
            self._settle_weights(self._model)
        self._parts.offload(parts)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # free torch's cached memory for other processes on the device

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """See the protocol."""
        self._parts.onload(parts)

    def live_bytes(self, part: MemoryPart) -> int:
        """Memory in bytes that a part occupies on the device now."""
        return live_bytes(self._part_tensors(part)) if self._model is not None else 0

    @property
    def num_updates(self) -> int:
        """Number of optimizer steps so far, including those before a resume."""
        return self._updates

    # What backends call

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

    def _require_optimizer(self) -> OptimizerT:
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
            self._break_weights(f"{what} failed midway ({type(error).__name__})")
            raise
        self._broken = None

    def _break_weights(self, why: str) -> None:
        """Refuse to work until weights are loaded."""
        self._broken = f"{why}, so its weights may match no completed step"

    def _over_ranks(self, value: float, operation: dist.ReduceOp.RedOpType) -> float:
        """Reduce a number over all ranks."""
        if self._ranks is None or self._ranks.size == 1:
            return value
        return float(self._ranks.all_reduce(torch.tensor(float(value), device=self._device), operation))

    def _max_over_ranks(self, finding: float) -> float:
        """Return the largest value of all ranks; infinite if one is not finite."""
        return self._over_ranks(finding if math.isfinite(finding) else math.inf, dist.ReduceOp.MAX)

    def _max_count(self, count: int) -> int:
        """Return the largest count of all ranks."""
        return int(self._over_ranks(count, dist.ReduceOp.MAX))

    def _all_agree(self, finding: bool) -> bool:
        """Whether the condition holds on every rank."""
        return bool(self._over_ranks(finding, dist.ReduceOp.MIN))

    def _part_tensors(self, part: MemoryPart) -> list[Tensor]:
        """Return the tensors of a part on the device, without those that stay on the host."""
        return [tensor for tensor in self._all_tensors(part) if tensor.device.type == self._device.type]

    def _metrics(
        self,
        cut: MicroBatches,
        losses: Sequence[float],
        grad_norm: float,
        rate: float,
        parts: Iterable[Metrics],
        timing: Metrics,
    ) -> Metrics:
        """Return the metrics of an update, which can be merged over all ranks: of the ranks that share a slice only one
        has some.

        Args:
            cut: the micro-batches of this rank.
            losses: what each adds to the loss.
            grad_norm: over all ranks, before clipping.
            rate: the learning rate of the step.
            parts: the loss's metrics of each micro-batch.
            timing: how long the phases took.
        """
        if self._ranks is not None and not self._ranks.leads_slice:
            return {}
        batch: TrainBatch = cut.batch
        own: Metrics = {
            "loss": Metric(math.fsum(losses), 1.0, "sum"),
            "perf/micro_batches": Metric(float(cut.num_filled), 1.0, "sum"),
            "perf/tokens": Metric(float(batch.num_tokens), 1.0, "sum"),
            "perf/computed_tokens": Metric(float(cut.num_computed_tokens), 1.0, "sum"),
        }
        if self.data_parallel_rank == 0:
            own |= {"grad_norm": Metric(grad_norm), "lr": Metric(rate)} | timing
        return merge_metrics(*parts) | own
