"""The memory of SGLang's schedulers by part: measures it, and on a CPU releases and restores it.

On a GPU SGLang's memory saver unmaps memory behind tensors that look unchanged; the CUDA driver reports what is mapped.
On a CPU SGLang 0.5.23 accepts a release but frees nothing. There this module empties the storages of a part in place;
weights are saved outside the engine's storages.

It uses SGLang's own hooks in every scheduler: one runs after a release, one before a restore, and one adds the measured
sizes to the scheduler's state.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from chatlearn_hosting.engine_side.emptied_storages import EmptiedStorages, storages_of

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""SGLang's names of the parts."""
STATE_KEY = "chatlearn_live_bytes"
"""Key in the scheduler's internal state, with a dict part -> bytes."""
CPU_VARIABLE = "SGLANG_USE_CPU_ENGINE"

_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_POOLS = "sglang.srt.mem_cache"
_MAPPED = 13
"""CU_POINTER_ATTRIBUTE_MAPPED of the CUDA driver: whether memory is mapped at an address."""

_emptied: dict[str, EmptiedStorages] = {}
"""part -> the released storages of this process's scheduler."""


def register() -> None:
    """Register the hooks; SGLang applies them in every process when it loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource("chatlearn_memory", "chatlearn-sglang")
    HookRegistry.register(_STATE, add_live_bytes, HookType.AFTER, source=source)
    if os.environ.get(CPU_VARIABLE) == "1":
        HookRegistry.register(f"{_UPDATER}.release_memory_occupation", empty, HookType.AFTER, source=source)
        HookRegistry.register(f"{_UPDATER}.resume_memory_occupation", fill, HookType.BEFORE, source=source)


def add_live_bytes(reply: Any, scheduler: Any, *_: Any) -> Any:
    """Add the bytes of each part, summed over the attention tensor-parallel ranks that this reply represents."""
    live = torch.tensor([live_bytes(scheduler, part) for part in (WEIGHTS, KV_CACHE)])
    if torch.distributed.get_world_size(scheduler.attn_tp_cpu_group) > 1:
        torch.distributed.all_reduce(live, group=scheduler.attn_tp_cpu_group)
    reply.internal_state[STATE_KEY] = dict(zip((WEIGHTS, KV_CACHE), live.tolist(), strict=True))
    return reply


def live_bytes(scheduler: Any, part: str) -> int:
    """Bytes that a part occupies on this rank now."""
    storages = _weights(scheduler) if part == WEIGHTS else _kv_cache(_pool(scheduler))
    return sum(storage.nbytes() for storage in storages if storage.device.type == "cpu" or _is_backed(storage))


def empty(_: Any, updater: Any, request: Any) -> None:
    """Release the memory of the named parts; runs after SGLang's own release."""
    scheduler = updater.scheduler
    for part in request.tags:
        if part == WEIGHTS:
            weights = _weights(scheduler)
            _emptied[part] = EmptiedStorages(weights, kept=weights)
        elif part == KV_CACHE:
            _emptied[part] = EmptiedStorages(_kv_cache(_pool(scheduler)), kept=())


def fill(updater: Any, request: Any) -> None:
    """Restore the memory of the named parts; runs before SGLang's own restore."""
    for part in request.tags:
        moved = _emptied.pop(part).fill()
        if part == KV_CACHE:
            _correct_addresses(_pool(updater.scheduler), moved)


def _pool(scheduler: Any) -> Any:
    return scheduler.token_to_kv_pool_allocator.get_kvcache()


def _weights(scheduler: Any) -> list[torch.UntypedStorage]:
    """Storages of all tensors that the model's modules hold."""
    model = scheduler.tp_worker.model_runner.model
    device = next(model.parameters()).device.type
    held = storages_of(vars(module) for module in model.modules())
    return [storage for storage in held if storage.device.type == device]


def _kv_cache(pool: Any) -> list[torch.UntypedStorage]:
    return storages_of(value for name, value in _fields(pool) if not _is_address_table(name))


def _fields(pool: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a pool's fields, and those of the pools inside it."""
    waiting, seen = [pool], {id(pool)}
    while waiting:
        for name, value in vars(waiting.pop()).items():
            if not type(value).__module__.startswith(_POOLS) or not hasattr(value, "__dict__"):
                yield name, value
            elif id(value) not in seen:
                seen.add(id(value))
                waiting.append(value)


def _is_address_table(name: str) -> bool:
    return name.endswith(("_ptrs", "_strides"))


def _correct_addresses(pool: Any, moved: Iterable[tuple[range, int]]) -> None:
    """Correct the tensors in which pools keep the addresses of their buffers."""
    places = list(moved)
    for name, table in _fields(pool):
        if name.endswith("_ptrs") and isinstance(table, torch.Tensor):
            new = [old + next((by for place, by in places if old in place), 0) for old in table.tolist()]
            table.copy_(torch.tensor(new, dtype=table.dtype).view(table.shape))


def _is_backed(storage: torch.UntypedStorage) -> bool:
    """Whether the driver has mapped memory at a GPU storage's address."""
    if not storage.nbytes():
        return False
    mapped = ctypes.c_int(0)
    address = ctypes.c_uint64(storage.data_ptr())
    status = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(ctypes.byref(mapped), _MAPPED, address)
    return status == 0 and mapped.value != 0
