"""A block of GPU memory that another process shares, as tensors."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_DEVICE_ARGUMENT = 6
"""Where ``torch.multiprocessing.reductions.rebuild_cuda_tensor`` takes the device's index, which differs by process."""


def open_cuda_block(content: Mapping[str, Any], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """(name, view) of every tensor in the block that lies on this worker's GPU.

    Args:
        content: {"blocks": pickled, by device UUID (function, arguments) that
            ``torch.multiprocessing.reductions.reduce_tensor`` made of a one-dimensional uint8 tensor,
            "tensors": [(name, dtype, shape, offset)]}.
        device: this worker's.

    Raises:
        RuntimeError: the block does not lie on this GPU.
    """
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    blocks = pickle.loads(content["blocks"])
    if uuid not in blocks:
        raise RuntimeError(
            f"the block lies on {', '.join(blocks)}, this worker on {uuid}; CUDA IPC needs sender and engine"
            " on the same GPU: place them together, or use the transport 'shared_memory' or 'broadcast'"
        )
    function, arguments = blocks[uuid]
    arguments = list(arguments)
    arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device()
    block: Tensor = function(*arguments)
    for name, dtype, shape, offset in content["tensors"]:
        kind: torch.dtype = getattr(torch, dtype)
        count = torch.Size(shape).numel()
        yield name, block[offset : offset + count * kind.itemsize].view(kind).view(tuple(shape))
