"""Shares a checkpoint's tensors from the GPU memory of another process, as a trainer on the same GPU does."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path

import torch

from chatlearn_core.types import MemoryHandle, TensorPlace
from chatlearn_testing.model_directory import manifest_of, read_checkpoint

_PATIENCE_S = 120.0


@contextmanager
def shared_by_another_process(directory: Path) -> Iterator[MemoryHandle]:
    """Yield a ``cuda_ipc`` handle to memory on the first GPU; it is valid inside the ``with``.

    Args:
        directory: contains ``model.safetensors``.

    Raises:
        queue.Empty: the other process did not share the tensors in time.
    """
    context = multiprocessing.get_context("spawn")
    handles: Queue[MemoryHandle] = context.Queue()
    done = context.Event()
    owner = context.Process(target=_share, args=(directory, handles, done))
    owner.start()
    try:
        yield handles.get(timeout=_PATIENCE_S)
    finally:
        done.set()
        owner.join(_PATIENCE_S)


def _share(directory: Path, handles: Queue[MemoryHandle], done: Event) -> None:
    from torch.multiprocessing.reductions import reduce_tensor

    tensors = read_checkpoint(directory)
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]).cuda()
    places, offset = [], 0
    for name, spec in manifest_of(tensors).tensors.items():
        places.append(TensorPlace(spec, offset))
        offset += tensors[name].nbytes
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    rebuild = reduce_tensor(flat)  # type: ignore[no-untyped-call]  # torch has no types here
    handles.put(MemoryHandle("cuda_ipc", {uuid: rebuild}, flat.numel(), tuple(places)))
    done.wait(_PATIENCE_S)
