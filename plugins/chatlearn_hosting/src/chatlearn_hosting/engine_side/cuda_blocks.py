"""Tensors in a block of GPU memory that another process shares. Needs torch and a CUDA device."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_DEVICE_ARGUMENT = 6
"""Position of the device index, which differs by process, in
``torch.multiprocessing.reductions.rebuild_cuda_tensor``."""


def open_cuda_block(content: Mapping[str, Any], device: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, view) of every tensor in the block that lies on this process's GPU.

    Args:
        content: {"blocks": pickled mapping from device UUID to the (function, arguments) that
            ``torch.multiprocessing.reductions.reduce_tensor`` returns for a one-dimensional uint8 tensor,
            "tensors": [(name, dtype, shape, offset)]}.
        device: index of this process's GPU.

    Raises:
        RuntimeError: the block is not on this GPU.
    """
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    blocks = pickle.loads(content["blocks"])
    if uuid not in blocks:
        raise RuntimeError(
            f"the block is on {', '.join(blocks)}, this process on {uuid}; CUDA IPC needs sender and engine"
            " on the same GPU: place them together, or use the transport 'shared_memory' or 'broadcast'"
        )
    function, arguments = blocks[uuid]
    arguments = list(arguments)
    arguments[_DEVICE_ARGUMENT] = device
    block: torch.Tensor = function(*arguments)
    for name, dtype, shape, offset in content["tensors"]:
        kind: torch.dtype = getattr(torch, dtype)
        count = torch.Size(shape).numel()
        yield name, block[offset : offset + count * kind.itemsize].view(kind).view(tuple(shape))
