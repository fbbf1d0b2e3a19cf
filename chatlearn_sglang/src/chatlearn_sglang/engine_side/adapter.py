"""The one LoRA adapter that every request uses, and that a weight sync gives new values.

SGLang serves adapters side by side, each under a name, and lets go of one when the last request that uses it has
ended. Here requests outlive the values they started under, so the adapter is there from the start, without tensors,
which changes nothing; a sync replaces what it holds, in place, on every rank, while nothing runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import cpu_stand_ins

NAME = "policy"
VARIABLE = "CHATLEARN_SGLANG_ADAPTER"
"""Set in processes of an engine that serves an adapter."""
TARGET = "sglang.srt.lora.lora_manager.LoRAManager.__init__"

_managers: list[Any] = []
"""This rank's ``LoRAManager``."""


def register() -> None:
    """Prepare this process, if its engine serves an adapter: the manager is kept, and a CPU can do without pinning."""
    if VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource("chatlearn_adapter", "chatlearn-sglang")
    HookRegistry.register(TARGET, keep_manager, HookType.AFTER, source=source)
    if not torch.accelerator.is_available():
        cpu_stand_ins.do_without_pinned_memory()


def keep_manager(_: None, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Called after ``LoRAManager.__init__``."""
    _managers[:] = [manager]


def first_request(target_modules: Iterable[str], num_ranks: int) -> Any:
    """Tells SGLang's front that the adapter is there; it holds no tensors yet."""
    from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput
    from sglang.srt.utils import MultiprocessingSerializer

    return LoadLoRAAdapterFromTensorsReqInput(
        lora_name=NAME,
        config_dict=configuration(1, 1.0, target_modules),
        serialized_named_tensors=[MultiprocessingSerializer.serialize({})] * num_ranks,
    )


def configuration(rank: int, alpha: float, target_modules: Iterable[str]) -> dict[str, Any]:
    """What SGLang reads of peft's ``adapter_config.json``."""
    return {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": sorted(target_modules)}


def replace(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], absent: Sequence[tuple[str, str, Sequence[int]]]
) -> None:
    """Let this rank serve other values.

    Args:
        tensors: by peft's names; SGLang keeps them on the host.
        config: see ``configuration``.
        absent: (name, dtype, shape) of tensors that SGLang fuses with some of these and that the adapter leaves as the
            base model has them: zeros stand for them.

    Raises:
        RuntimeError: SGLang did not take them; says why.
    """
    [manager] = _managers
    [reference] = [ref for ref in manager.lora_refs.values() if ref.lora_name == NAME]
    zeros = {name: torch.zeros(tuple(shape), dtype=getattr(torch, dtype)) for name, dtype, shape in absent}
    _require(manager.unload_lora_adapter(reference))
    _require(manager.load_lora_adapter_from_tensors(reference, {**tensors, **zeros}, dict(config)))
    # SGLang would copy them to where they are used with the next batch, and die there of what does not fit.
    manager.fetch_new_loras({reference.lora_id})


def _require(result: Any) -> None:
    if not result.success:
        raise RuntimeError(f"SGLang did not take the adapter: {result.error_message}")
