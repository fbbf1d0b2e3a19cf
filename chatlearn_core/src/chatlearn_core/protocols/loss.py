"""A loss: a pure function of outputs and batch that runs in the worker that has the logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from chatlearn_core.types import Metrics, OutputRequest, Outputs, TrainBatch

Unit = Literal["sequence", "pair", "group"]


@dataclass(slots=True)
class LossOutput:
    """The result of a loss for one micro-batch."""

    total: Tensor
    """Scalar: the sum of weighted terms over this micro-batch. The weights already include the global denominator, so
    the totals of all micro-batches and ranks add up to the loss of the global mini-batch."""
    metrics: Metrics = field(default_factory=dict)
    """Detached partial metrics, merged over micro-batches and ranks."""


class Loss(Protocol):
    """A loss over a mini-batch.

    The executor calls ``prepare`` once on the whole global mini-batch; the batch is then split over ranks and
    micro-batches, and the trainer calls the loss on each part with the outputs it asked for.
    """

    @property
    def needs(self) -> OutputRequest:
        """The outputs that the loss reads; checked against those that the trainer provides before anything starts.

        Called: before the run, and by trainers; in the driver and each rank's process; any number of times.
        """

    @property
    def unit(self) -> Unit:
        """The kind of unit that is never split over micro-batches or ranks.

        Called: before the run, and when batches are split; in the driver and each rank's process; any number of
        times.
        """

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        """Add data that depends on the whole mini-batch: ``token_data["loss_weight"]`` and detached statistics.

        Called: before a mini-batch is split; in the driver; once per mini-batch.
        """

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        """The loss of one micro-batch. An empty batch gives a zero connected to the outputs' graph, if there is one.

        Called: for each micro-batch; in each rank's process; once per micro-batch.
        """
