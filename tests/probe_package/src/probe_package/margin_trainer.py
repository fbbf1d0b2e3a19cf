"""The trainer fsdp with one more output: the margin between the two most likely tokens."""

from dataclasses import dataclass, replace
from pathlib import Path

from chatlearn_core.protocols import Loss, LossOutput, RoleContext
from chatlearn_core.protocols.loss import Unit
from chatlearn_core.types import Metrics, OutputRequest, Outputs, TrainBatch
from chatlearn_fsdp.trainer import FSDPTrainer
from chatlearn_testing.recorded_batches import record_batch
from probe_package.options import MarginTrainerOptions

MARGIN, TOP = "margin", "topk_logprobs"


def for_margin(request: OutputRequest) -> OutputRequest:
    """A request of outputs that ``fsdp`` has, from which ``with_margin`` makes those of ``request``."""
    top = max(2, int(request.arguments.get("k", 0)))
    return replace(request, names=request.names - {MARGIN} | {TOP}, arguments={**request.arguments, "k": top})


def with_margin(outputs: Outputs, request: OutputRequest) -> Outputs:
    """What ``request`` asks for."""
    top = outputs[TOP]
    count = int(request.arguments.get("k", 0))
    cut = {name: outputs[name][:, :count] for name in ("topk_ids", TOP) if name in request.names}
    kept = {name: values for name, values in outputs.items() if name in request.names}
    return kept | cut | {MARGIN: top[:, 0] - top[:, 1]}


@dataclass(frozen=True)
class MarginLoss:
    """A loss that reads margins, for a trainer that has none."""

    loss: Loss

    @property
    def needs(self) -> OutputRequest:
        return for_margin(self.loss.needs)

    @property
    def unit(self) -> Unit:
        return self.loss.unit

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        return self.loss.prepare(batch)

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        return self.loss(with_margin(outputs, self.loss.needs), batch)


class MarginTrainer(FSDPTrainer):
    """Uses nothing of its base but methods of the protocol."""

    def __init__(self, options: MarginTrainerOptions, context: RoleContext) -> None:
        super().__init__(options, context)
        self.record = options.record

    def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        if MARGIN not in request.names:
            return super().compute(batch, request)
        return with_margin(super().compute(batch, for_margin(request)), request)

    def update(self, batch: TrainBatch, loss: Loss) -> Metrics:
        if self.record is not None:
            record_batch(Path(self.record), self.context, batch)
        return super().update(batch, MarginLoss(loss) if MARGIN in loss.needs.names else loss)
