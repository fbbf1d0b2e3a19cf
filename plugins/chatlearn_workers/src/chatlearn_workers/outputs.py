"""Transport of a trainer rank's outputs: per-token outputs in a block, per-sequence outputs by value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from chatlearn_core.plugins.records import OutputSpec
from chatlearn_core.types import Derived, Metrics, Outputs
from chatlearn_core.types.array_ref import Array, ArrayRef, Block, Rows, TensorRef
from chatlearn_workers.arrays import TensorArray, to_arrays, to_tensors


@dataclass(slots=True, frozen=True)
class ComputedFacts:
    """The facts about a rank's outputs that the driver receives."""

    at_hand: Mapping[str, TensorArray]
    """Outputs with one row per sequence."""
    stored: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and dtype of the arrays in the block, which have one row per token."""

    def outputs(self, block: Block) -> Outputs:
        """The outputs; those in the block by reference."""
        outputs: dict[str, torch.Tensor] = to_tensors(self.at_hand)
        for name, (shape, dtype) in self.stored.items():
            rows = Rows(block, name, 0, shape[0])
            whole = ArrayRef([rows], shape[1:], dtype, "a batch", name)
            outputs[name] = cast(torch.Tensor, TensorRef([cast(Array, whole)]))
        return outputs

    @property
    def num_bytes(self) -> int:
        """Bytes in the block."""
        return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self.stored.values())


@dataclass(slots=True, frozen=True)
class DerivedFacts:
    """The facts about data that a rank derived from its slice; per-token data are in the block."""

    computed: ComputedFacts
    per_sequence: frozenset[str]
    """Names of the data with one row per sequence."""
    exclusions: Mapping[str, str]
    metrics: Metrics

    @property
    def num_bytes(self) -> int:
        """Bytes in the block."""
        return self.computed.num_bytes


def pack_derived(derived: Derived) -> tuple[DerivedFacts, dict[str, Array]]:
    """Facts, and the block."""
    block = {name: _array(tensor) for name, tensor in derived.token_data.items()}
    stored = {name: (array.shape, array.dtype.str) for name, array in block.items()}
    computed = ComputedFacts(to_arrays(derived.sequence_data), stored)
    return DerivedFacts(computed, frozenset(derived.sequence_data), derived.exclusions, derived.metrics), block


def pack_outputs(outputs: Outputs, specs: Mapping[str, OutputSpec]) -> tuple[ComputedFacts, dict[str, Array]]:
    """Facts, and the block."""
    block = {name: _array(tensor) for name, tensor in outputs.items() if specs[name].per == "token"}
    at_hand = {name: tensor for name, tensor in outputs.items() if specs[name].per == "sequence"}
    stored = {name: (array.shape, array.dtype.str) for name, array in block.items()}
    return ComputedFacts(to_arrays(at_hand), stored), block


def _array(tensor: torch.Tensor) -> Array:
    """The array as samples store it: floating-point numbers in float32."""
    host = tensor.detach().cpu()
    return (host.float() if host.is_floating_point() else host).numpy()
