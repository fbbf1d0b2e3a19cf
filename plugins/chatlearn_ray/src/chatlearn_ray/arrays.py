"""Tensors as numpy arrays on their way between processes.

Ray hands numpy arrays out of its object store as views, without a copy; torch tensors it would copy for every reader.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatlearn_core.types import TrainBatch

_CARRIERS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
"""Types that numpy does not have travel as integers of the same width."""


@dataclass(slots=True, frozen=True)
class TensorArray:
    """A tensor's values as an array, and its type where numpy has none for it."""

    array: npt.NDArray[Any]
    dtype: str | None = None

    @staticmethod
    def of(tensor: Tensor) -> TensorArray:
        """From a tensor on any device; one on the host is not copied."""
        host = tensor.detach().cpu()
        carrier = _CARRIERS.get(host.dtype)
        if carrier is None:
            return TensorArray(host.numpy())
        return TensorArray(host.view(carrier).numpy(), str(host.dtype).removeprefix("torch."))

    def tensor(self) -> Tensor:
        """A view. It may be read-only: who gets a batch does not write into it."""
        array = self.array
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            view = torch.from_numpy(array if array.ndim else np.array(array))
        return view if self.dtype is None else view.view(getattr(torch, self.dtype))


@dataclass(slots=True, frozen=True)
class BatchArrays:
    """A ``TrainBatch`` as arrays."""

    sample_ids: tuple[str, ...]
    fields: Mapping[str, TensorArray]
    token_data: Mapping[str, TensorArray]
    sequence_data: Mapping[str, TensorArray]

    @staticmethod
    def of(batch: TrainBatch) -> BatchArrays:
        """From a batch on the host, without a copy."""
        return BatchArrays(
            batch.sample_ids,
            {name: TensorArray.of(getattr(batch, name)) for name in _FIELDS},
            to_arrays(batch.token_data),
            to_arrays(batch.sequence_data),
        )

    def batch(self) -> TrainBatch:
        """The batch, its tensors views of the arrays."""
        return TrainBatch(
            sample_ids=self.sample_ids,
            **{name: array.tensor() for name, array in self.fields.items()},
            token_data=to_tensors(self.token_data),
            sequence_data=to_tensors(self.sequence_data),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.array.nbytes for part in (self.fields, self.token_data, self.sequence_data) for a in part.values())


_FIELDS = ("token_ids", "cu_seqlens", "loss_mask", "unit_index", "group_index")


def to_arrays(tensors: Mapping[str, Tensor]) -> dict[str, TensorArray]:
    """Every tensor of a mapping as an array."""
    return {name: TensorArray.of(tensor) for name, tensor in tensors.items()}


def to_tensors(arrays: Mapping[str, TensorArray]) -> dict[str, Tensor]:
    """The other way."""
    return {name: array.tensor() for name, array in arrays.items()}
