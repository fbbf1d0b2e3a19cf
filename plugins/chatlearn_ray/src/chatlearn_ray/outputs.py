"""Outputs of a trainer rank on their way: what is per token in a block, what is per sequence by value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from chatlearn_core.types import SEQUENCE_OUTPUTS, Outputs
from chatlearn_core.types.stored import Array, Block, Rows, StoredArray, StoredTensor
from chatlearn_ray.arrays import TensorArray, to_arrays, to_tensors


@dataclass(slots=True, frozen=True)
class ComputedFacts:
    """What the driver hears of a rank's outputs."""

    at_hand: Mapping[str, TensorArray]
    """Outputs with one row a sequence."""
    stored: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and type of the arrays in the block, those with one row a token."""

    def outputs(self, block: Block) -> Outputs:
        """The outputs, those in the block by reference."""
        outputs: dict[str, torch.Tensor] = to_tensors(self.at_hand)
        for name, (shape, dtype) in self.stored.items():
            rows = Rows(block, name, 0, shape[0])
            outputs[name] = StoredTensor([cast(Array, StoredArray([rows], shape[1:], dtype))])
        return outputs

    @property
    def num_bytes(self) -> int:
        """Bytes in the block."""
        return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self.stored.values())


def pack_outputs(outputs: Outputs) -> tuple[ComputedFacts, dict[str, Array]]:
    """Facts, and the block. What numpy has no type for (bfloat16) becomes float32, which holds the same numbers."""
    block = {name: _array(tensor) for name, tensor in outputs.items() if name not in SEQUENCE_OUTPUTS}
    at_hand = {str(name): tensor for name, tensor in outputs.items() if name in SEQUENCE_OUTPUTS}
    stored = {str(name): (array.shape, array.dtype.str) for name, array in block.items()}
    return ComputedFacts(to_arrays(at_hand), stored), {str(name): array for name, array in block.items()}


def _array(tensor: torch.Tensor) -> Array:
    host = tensor.detach().cpu()
    return (host.float() if host.dtype in (torch.bfloat16, torch.float16) else host).numpy()
