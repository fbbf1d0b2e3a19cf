"""What losses with an aggregation of their tokens share: its weights, and what must stay together for them."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from chatlearn_core.exceptions import FlowError
from chatlearn_core.protocols.aggregation import Aggregation
from chatlearn_core.protocols.loss import Unit
from chatlearn_core.types import TrainBatch
from chatlearn_losses import AggregationMode, aggregation_weights


class AggregatedLoss:
    """A loss Σ_t w_t x_t, whose weights w contain the denominator of the whole mini-batch."""

    __slots__ = ()

    aggregation: AggregationMode | Aggregation
    """A name in ``chatlearn_losses``, or one that a plugin registers."""
    constant_length: int | None = None
    """Length for ``seq_mean_token_sum_norm``, if the aggregation is given by name."""

    @property
    def reads(self) -> frozenset[str]:
        """What a plugin's aggregation looks at, see ``ReadsSamples``."""
        return self.aggregation.reads if isinstance(self.aggregation, Aggregation) else frozenset()

    @property
    def unit(self) -> Unit:
        """A group for ``prompt_mean``, whose denominator counts the tokens of all completions of a prompt."""
        if isinstance(self.aggregation, Aggregation):
            return self.aggregation.loss_unit
        return "group" if self.aggregation == "prompt_mean" else "sequence"

    def weights(self, batch: TrainBatch) -> Tensor:
        """[T] w, from the whole mini-batch."""
        if isinstance(self.aggregation, Aggregation):
            return self.aggregation(batch)
        return aggregation_weights(batch, self.aggregation, constant_length=self.constant_length)


def check_token_data(batch: TrainBatch, needed: Collection[str], reader: str, remedy: str) -> None:
    """Check that every sample has what a loss reads. Raises: FlowError: names what is missing and what there is."""
    missing = sorted(set(needed) - batch.token_data.keys())
    if batch.num_sequences and missing:
        raise FlowError(
            f"{reader} reads {', '.join(missing)}, which not every sample of the mini-batch carries (samples "
            f"{batch.sample_ids[0]} ... {batch.sample_ids[-1]}; it has: "
            f"{', '.join(sorted(batch.token_data)) or 'nothing'}). {remedy}"
        )
