"""An aggregation: how the per-token losses of a mini-batch become one number."""

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
    """A registered function (``AggregationSpec``) with its options. It can be pickled where the function is a module's
    own, as losses need that travel to workers.
    """

    name: str
    function: Callable[[TrainBatch, Any], Tensor]
    options: Any
    """Instance of the record's options model."""
    loss_unit: Literal["sequence", "group"] = "sequence"
    reads: frozenset[str] = frozenset()
    """Fields whose values the function looks at (``ReadsSamples``)."""

    def __call__(self, batch: TrainBatch) -> Tensor:
        """[T] float32 what each token's loss counts in the global mini-batch.

        Raises:
            ContractError: the function returned something else, or weighs tokens that are not learned from.
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
"""(name, options) -> the aggregation. Raises PluginError or ConfigError: there is none of that name, or it does not
take the options."""
