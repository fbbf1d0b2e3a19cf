"""An aggregation: how the per-token losses of a mini-batch are reduced to one number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from chatlearn_core.exceptions import ContractError
from chatlearn_core.types import TrainBatch


@dataclass(slots=True, frozen=True)
class Aggregation:
    """A registered function (``AggregationSpec``) with its options. It can be pickled if the function is a module-level
    one, as required for losses that are sent to workers.
    """

    name: str
    function: Callable[[TrainBatch, Any], Tensor]
    options: Any
    """Instance of the options model of the plugin record."""
    loss_unit: Literal["sequence", "group"] = "sequence"
    reads: frozenset[str] = frozenset()
    """Fields whose values the function reads (``ReadsSamples``)."""

    def __call__(self, batch: TrainBatch) -> Tensor:
        """[T] float32 weight of each token's loss in the global mini-batch.

        Raises:
            ContractError: the function returned something else, or gave weight to tokens outside the loss mask.
        """
        weights = self.function(batch, self.options)
        if not isinstance(weights, Tensor) or weights.shape != (batch.num_tokens,) or not weights.is_floating_point():
            found = f"{list(weights.shape)} {weights.dtype}" if isinstance(weights, Tensor) else type(weights).__name__
            raise ContractError(
                f"aggregation {self.name!r} returned {found}; it must return floating-point weights, one for each of "
                f"the {batch.num_tokens} tokens"
            )
        mask = batch.loss_mask.to(weights.device)
        if not bool(torch.isfinite(weights).all()) or bool((weights[~mask] != 0).any()):
            raise ContractError(
                f"aggregation {self.name!r} returned weights that are not finite, or not 0 where loss_mask is False"
            )
        return weights.float()


SelectAggregation = Callable[[str, Mapping[str, Any]], Aggregation]
"""(name, options) -> the aggregation. Raises PluginError if no aggregation has that name, ConfigError if it rejects the
options."""
