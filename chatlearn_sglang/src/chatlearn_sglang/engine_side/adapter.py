"""The only LoRA adapter: every request uses it, and a weight sync replaces its values.

SGLang serves adapters side by side by name, and unloads an adapter when its last request has ended. Here requests
outlive the weights they started with, so the adapter exists from the start, without tensors, and so without effect. A
sync replaces its tensors in place on every rank while no request runs.
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
"""Environment variable that is set in the processes of an engine with an adapter."""
TARGET = "sglang.srt.lora.lora_manager.LoRAManager.__init__"

_managers: list[Any] = []
"""The ``LoRAManager`` of this rank, once it exists."""


def register() -> None:
    """Register the hook that keeps the ``LoRAManager``, if the engine serves an adapter; without a GPU disable memory
    pinning.
    """
    if VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource("chatlearn_adapter", "chatlearn-sglang")
    HookRegistry.register(TARGET, keep_manager, HookType.AFTER, source=source)
    if not torch.accelerator.is_available():
        cpu_stand_ins.do_without_pinned_memory()


def keep_manager(_: None, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Keep the manager; runs after ``LoRAManager.__init__``."""
    _managers[:] = [manager]


def first_request(target_modules: Iterable[str], num_ranks: int) -> Any:
    """Return the request that registers the adapter, still without tensors, in SGLang's tokenizer manager."""
    from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput
    from sglang.srt.utils import MultiprocessingSerializer

    return LoadLoRAAdapterFromTensorsReqInput(
        lora_name=NAME,
        config_dict=configuration(1, 1.0, target_modules),
        serialized_named_tensors=[MultiprocessingSerializer.serialize({})] * num_ranks,
    )


def configuration(rank: int, alpha: float, target_modules: Iterable[str]) -> dict[str, Any]:
    """Return the fields of peft's ``adapter_config.json`` that SGLang reads."""
    return {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": sorted(target_modules)}


def replace(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], absent: Sequence[tuple[str, str, Sequence[int]]]
) -> None:
    """Replace the values of the adapter on this rank.

    Args:
        tensors: tensors by peft's names; SGLang keeps them on the host.
        config: see ``configuration``.
        absent: (name, dtype, shape) of tensors that SGLang fuses with some of these but the adapter lacks; zeros
            replace them, which leaves the base model unchanged.

    Raises:
        RuntimeError: SGLang refused the tensors; the message has its reason.
    """
    [manager] = _managers
    [reference] = [ref for ref in manager.lora_refs.values() if ref.lora_name == NAME]
    zeros = {name: torch.zeros(tuple(shape), dtype=getattr(torch, dtype)) for name, dtype, shape in absent}
    _require(manager.unload_lora_adapter(reference))
    _require(manager.load_lora_adapter_from_tensors(reference, {**tensors, **zeros}, dict(config)))
    # Otherwise SGLang would copy them to the device with the next batch, and crash there if they do not fit.
    manager.fetch_new_loras({reference.lora_id})


def _require(result: Any) -> None:
    if not result.success:
        raise RuntimeError(f"SGLang refused the adapter: {result.error_message}")
