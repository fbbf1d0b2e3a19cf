"""Two collectives that vLLM's CPU communicator lacks.

Before the experts, the ranks of a data-parallel engine gather the tokens of all ranks; after them, they sum and
distribute the experts' outputs. Ranks hold different numbers of tokens, so vLLM uses ``all_gatherv`` and
``reduce_scatterv``. vLLM 0.32 implements both only for GPUs; on a CPU the first mixture of experts ends in a
``NotImplementedError``. gloo has neither, so this module pads tensors to the longest, and reduces the whole sum on
every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def add_missing_collectives() -> None:
    """Add the missing collectives to vLLM's CPU communicator. Does nothing on a GPU, or where vLLM implements them."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for name, function in (("all_gatherv", _all_gatherv), ("reduce_scatterv", _reduce_scatterv)):
        if getattr(CpuCommunicator, name) is getattr(DeviceCommunicatorBase, name):
            setattr(CpuCommunicator, name, function)


def all_gatherv(tensor: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int] | None) -> Tensor:
    """Concatenate the tensors of all ranks along ``dim``.

    Args:
        tensor: this rank's tensor; shapes may differ only in ``dim``.
        group: the process group.
        dim: dimension, may be negative.
        sizes: each rank's size in ``dim``; None means all are equal.

    Example: ranks with [2, 8] and [3, 8] both get [5, 8] for ``dim=0, sizes=[2, 3]``.
    """
    mine = tensor.movedim(dim, 0).contiguous()
    if sizes is None:
        sizes = [mine.shape[0]] * group.size()
    rest = mine.shape[1:]
    padded = mine.new_zeros((max(sizes), *rest))
    padded[: mine.shape[0]] = mine
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    return whole.movedim(0, dim).contiguous()


def reduce_scatterv(tensor: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int] | None) -> Tensor:
    """Sum the tensors of all ranks and return this rank's part along ``dim``.

    Args:
        tensor: this rank's tensor, of the same shape on all ranks; it is not changed.
        group: the process group.
        dim: dimension, may be negative.
        sizes: each rank's share of ``dim``; None means equal shares.
    """
    summed = tensor.movedim(dim, 0).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=group)
    if sizes is None:
        sizes = [summed.shape[0] // group.size()] * group.size()
    first = sum(sizes[: group.rank()])
    return summed[first : first + sizes[group.rank()]].movedim(0, dim).contiguous()


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    """Same signature as in the GPU communicator: takes one tensor or a list."""
    if isinstance(input_, Tensor):
        return all_gatherv(input_, self.device_group, dim, sizes)
    return [all_gatherv(tensor, self.device_group, dim, sizes) for tensor in input_]


def _reduce_scatterv(self: Any, input_: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """Same signature as in the GPU communicator."""
    return reduce_scatterv(input_, self.device_group, dim, sizes)
