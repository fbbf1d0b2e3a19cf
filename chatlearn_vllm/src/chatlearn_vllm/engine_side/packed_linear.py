"""Frees and restores weights that vLLM's CPU kernels keep in a packed copy, invisible to torch.

A linear layer on a CPU multiplies with the copy that it packed at load time (``layer.cpu_linear``), and its parameter
is empty afterwards. Before the packed memory is freed, the weights are read back by multiplying with the identity. This
is exact: a sum of one weight and zeros has no rounding. Packing them again gives the same kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

_ROWS = 1024
"""Rows of the identity matrix in one multiplication."""


def packed_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the packed weights that are torch tensors."""
    yield from (content for content in _kept_by_kernel(module) if isinstance(content, Tensor))


def packed_bytes(module: nn.Module) -> int:
    """Bytes packed into oneDNN memory, which torch does not see; padding is not counted."""
    handlers = [content for content in _kept_by_kernel(module) if hasattr(content, "handler_tensor")]
    return sum(int(handler.n * handler.k) * _dtype(module).itemsize for handler in handlers)


def is_packed(module: nn.Module) -> bool:
    """Whether a layer's kernel keeps its own copy of the weights."""
    return any(True for _ in _kept_by_kernel(module))


class UnpackedLinear:
    """A layer whose packed memory has been freed, with its weights as an ordinary tensor."""

    def __init__(self, module: Any, *, keep_values: bool) -> None:
        """Free the packed memory. The layer cannot compute until ``pack`` is called.

        Args:
            module: an ``nn.Module`` for which ``is_packed`` is true.
            keep_values: False discards the weights; ``pack`` then packs zeros.
        """
        self._module = module
        self._parameter = module.weight
        self._shape: torch.Size | None = None
        """[outputs, inputs] if only the packed copy holds the weights; None if the parameter holds them too."""
        self._values: Tensor | None = None
        if not self._parameter.numel():
            self._shape = get_layerwise_info(module).restore_metadata[0]["weight"].shape
            if keep_values:
                self._values = _unpacked(module, *self._shape)
        module.cpu_linear = None  # that was the last reference to the packed copy

    def pack(self) -> None:
        """Create the kernel again, as vLLM does after loading. The layer's parameters must be in place."""
        module = self._module
        if self._shape is None:
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
            return
        values = torch.zeros(self._shape, dtype=self._parameter.dtype) if self._values is None else self._values
        module.weight = nn.Parameter(values, requires_grad=False)
        dispatch_cpu_unquantized_gemm(module, remove_weight=True)
        if not module.weight.numel():
            module.weight = self._parameter
        self._values = None


def _kept_by_kernel(module: nn.Module) -> Iterator[Any]:
    """Yield the tensors and oneDNN handles in the closure of the kernel function."""
    kernel = vars(module).get("cpu_linear")
    for cell in getattr(kernel, "__closure__", None) or ():
        if isinstance(cell.cell_contents, Tensor) or hasattr(cell.cell_contents, "handler_tensor"):
            yield cell.cell_contents


def _dtype(module: Any) -> torch.dtype:
    dtype: torch.dtype = module.weight.dtype
    return dtype


@torch.no_grad()
def _unpacked(module: Any, num_outputs: int, num_inputs: int) -> Tensor:
    """Return the layer's weights, [num_outputs, num_inputs]."""
    values = torch.empty(num_outputs, num_inputs, dtype=_dtype(module))
    for start in range(0, num_inputs, _ROWS):
        rows = min(_ROWS, num_inputs - start)
        identity = torch.zeros(rows, num_inputs, dtype=values.dtype)
        identity[:, start : start + rows].fill_diagonal_(1)
        values[:, start : start + rows] = module.cpu_linear(identity, module.weight, None).t()
    return values
