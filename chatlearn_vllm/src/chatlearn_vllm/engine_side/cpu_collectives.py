"""Two collectives that vLLM's communicator for CPUs lacks.

Ranks of a data-parallel engine gather the tokens of all ranks before the experts, then sum and share out what the
experts made of them: ``all_gatherv`` and ``reduce_scatterv``, since ranks have different numbers of tokens. vLLM 0.32
has both for GPUs alone; on a CPU the first mixture of experts ends in a ``NotImplementedError``. gloo has neither, so
tensors are padded to the longest, and sums are taken whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def add_missing_collectives() -> None:
    """Give vLLM's communicator for CPUs what it has none of; nothing to do on a GPU, or where it has its own."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for name, function in (("all_gatherv", _all_gatherv), ("reduce_scatterv", _reduce_scatterv)):
        if getattr(CpuCommunicator, name) is getattr(DeviceCommunicatorBase, name):
            setattr(CpuCommunicator, name, function)


def all_gatherv(tensor: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int] | None) -> Tensor:
    """The tensors of all ranks, concatenated along ``dim``.

    Args:
        tensor: of this rank; shapes differ in ``dim`` alone.
        group: its ranks.
        dim: may be negative.
        sizes: what each rank has in ``dim``; None: all the same.
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
    """This rank's part along ``dim`` of the sum of all ranks' tensors.

    Args:
        tensor: of this rank, of the same shape on all; it is not changed.
        group: its ranks.
        dim: may be negative.
        sizes: what each rank gets of ``dim``; None: all the same.
    """
    summed = tensor.movedim(dim, 0).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=group)
    if sizes is None:
        sizes = [summed.shape[0] // group.size()] * group.size()
    first = sum(sizes[: group.rank()])
    return summed[first : first + sizes[group.rank()]].movedim(0, dim).contiguous()


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    """As the communicator for GPUs has it: one tensor, or several."""
    if isinstance(input_, Tensor):
        return all_gatherv(input_, self.device_group, dim, sizes)
    return [all_gatherv(tensor, self.device_group, dim, sizes) for tensor in input_]


def _reduce_scatterv(self: Any, input_: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """As the communicator for GPUs has it."""
    return reduce_scatterv(input_, self.device_group, dim, sizes)
