"""The memory of one vLLM worker by part: measures it, and on a CPU releases and restores it.

On a GPU vLLM's own allocator releases memory and reports what it holds. On a CPU vLLM 0.32 ignores ``sleep``, so this
module empties the storages of a part in place; contents that must return wait in host memory outside the engine.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from chatlearn_hosting.engine_side.emptied_storages import EmptiedStorages, storages_of

from .packed_linear import UnpackedLinear, is_packed, packed_bytes, packed_tensors
from .process_state import return_freed_memory

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""Names of the parts, equal to those of vLLM's allocator."""
DROPPED = 2
"""Sleep level that drops the parameters."""


class WorkerMemory:
    """The weights and the KV cache of one worker."""

    def __init__(self, worker: Any) -> None:
        """Start with everything awake.

        Args:
            worker: vLLM's worker, with its model loaded.
        """
        self._worker = worker
        self._emptied: dict[str, EmptiedStorages] = {}
        self._unpacked: list[UnpackedLinear] = []

    def live_bytes(self, part: str) -> int:
        """Bytes that ``weights`` or ``kv_cache`` occupy on the worker's device now.

        On a CPU the weights are all tensors that the model's modules hold, and the packed copies of kernels. On a GPU
        they are the memory that vLLM's allocator holds for them, and parameters and buffers outside of it.
        """
        if self._worker.device.type != "cpu":
            registered = ((m._parameters, m._buffers) for m in self._modules())
            return _allocated_bytes(part, self._on_device(registered) if part == WEIGHTS else self._kv_cache())
        storages = self._weights() if part == WEIGHTS else self._kv_cache()
        packed = sum(map(packed_bytes, self._modules())) if part == WEIGHTS else 0
        return packed + sum(storage.nbytes() for storage in storages)

    def sleep(self, level: int) -> None:
        """Release memory that is not yet released; CPU only.

        Args:
            level: 0 drops the KV cache; 1 also saves and empties the weights; 2 also drops the parameters.
        """
        if KV_CACHE not in self._emptied:
            self._emptied[KV_CACHE] = EmptiedStorages(self._kv_cache(), kept=())
        if level and WEIGHTS not in self._emptied:
            keep_values = level != DROPPED
            packed = [module for module in self._modules() if is_packed(module)]
            self._unpacked = [UnpackedLinear(module, keep_values=keep_values) for module in packed]
            weights = self._weights()
            parameters = {storage._cdata for storage in storages_of(m._parameters for m in self._modules())}
            kept = [storage for storage in weights if keep_values or storage._cdata not in parameters]
            self._emptied[WEIGHTS] = EmptiedStorages(weights, kept=kept)
        return_freed_memory()

    def wake(self, parts: Iterable[str]) -> None:
        """Restore the memory of parts; CPU only. The KV cache returns empty."""
        for part in parts:
            self._emptied.pop(part).fill()
            if part == WEIGHTS:
                while self._unpacked:
                    self._unpacked.pop().pack()

    def _modules(self) -> Iterator[nn.Module]:
        for model in (self._worker.get_model(), self._worker.get_draft_model()):
            if model is not None:
                yield from model.modules()

    def _kv_cache(self) -> list[torch.UntypedStorage]:
        return storages_of(self._worker.model_runner.kv_caches)

    def _weights(self) -> list[torch.UntypedStorage]:
        """Storages of all tensors that modules hold, without their views of the KV cache."""
        cache = {storage._cdata for storage in self._kv_cache()}
        held = self._on_device((vars(module), *packed_tensors(module)) for module in self._modules())
        return [storage for storage in held if storage._cdata not in cache]

    def _on_device(self, content: Any) -> list[torch.UntypedStorage]:
        """Return the storages on the worker's device, without the meta tensors that vLLM keeps for its loaders."""
        device = self._worker.device.type
        return [storage for storage in storages_of(content) if storage.device.type == device]


def _allocated_bytes(part: str, storages: Iterable[torch.UntypedStorage]) -> int:
    """Bytes on the GPU that vLLM's allocator holds for a part, plus storages of the part outside the allocator."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocations = CuMemAllocator.get_instance().pointer_to_data
    starts = sorted(allocations)

    def is_outside(storage: torch.UntypedStorage) -> bool:
        at = bisect.bisect_right(starts, storage.data_ptr()) - 1
        return at < 0 or storage.data_ptr() >= starts[at] + allocations[starts[at]].handle[1]

    held = sum(data.handle[1] for data in allocations.values() if data.tag == part and not data.is_asleep)
    return int(held) + sum(storage.nbytes() for storage in storages if is_outside(storage))
