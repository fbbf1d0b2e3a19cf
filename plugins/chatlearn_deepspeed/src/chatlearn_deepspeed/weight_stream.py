"""Exports weights under checkpoint names, with adapters merged; ZeRO-3 gathers them by buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from chatlearn_core.types import WeightShard
from chatlearn_core.types.boxes import full_box
from chatlearn_deepspeed.zero import ZeroModel
from chatlearn_hf.checkpoint_names import CheckpointLayout, StateTensor
from chatlearn_hf.lora import adapter_names, adapters, base_state
from chatlearn_hf.weight_export import EXPORT_OWNER

LORA_WEIGHTS = (".lora_A.default.weight", ".lora_B.default.weight")


def whole_tensors(zero: ZeroModel, layout: CheckpointLayout, bucket_bytes: int) -> Iterator[tuple[StateTensor, Tensor]]:
    """Yield every state tensor whole, in the layout's order, with its adapter merged. Collective with ZeRO-3.

    Args:
        zero: the model.
        layout: layout of the model without adapters.
        bucket_bytes: ZeRO-3 gathers tensors of at most so many bytes at once, or one larger tensor, and frees them
            before it gathers the next.
    """
    model, live = zero.packed.model, _live_parameters(zero)
    for bucket in _buckets(zero, layout, live, bucket_bytes):
        with zero.gathered([parameter for entry in bucket for parameter in live.get(entry.key, ())]):
            state, adapter_of = base_state(model), adapters(model)
            for entry in bucket:
                tensor, adapter = state[entry.key].detach(), adapter_of.get(entry.key)
                with torch.no_grad():
                    merged = tensor if adapter is None else adapter.merge(tensor, adapter.down, adapter.up)
                yield entry, merged
            del state, adapter_of


def stream_adapter(zero: ZeroModel) -> Iterator[WeightShard]:
    """Yield the adapters' tensors by peft's names, the same on every rank. Collective with ZeRO-3."""
    model = zero.packed.model
    for weight, names in adapter_names(model).items():
        pair = _live_parameters(zero)[weight][1:]
        with zero.gathered(pair):
            for name, parameter in zip(names, pair, strict=True):
                tensor = parameter.detach()
                shape = tuple(tensor.shape)
                yield WeightShard(name, shape, full_box(shape), EXPORT_OWNER, tensor)


def _live_parameters(zero: ZeroModel) -> dict[str, tuple[nn.Parameter, ...]]:
    """Return state name without adapters -> the parameter, and its adapter's A and B if it has one."""
    named = zero.parameters()
    found: dict[str, tuple[nn.Parameter, ...]] = {}
    for name, parameter in named.items():
        if any(name.endswith(end) for end in LORA_WEIGHTS):
            continue
        module, is_adapted, rest = name.partition(".base_layer.")
        pair = tuple(named[module + end] for end in LORA_WEIGHTS) if is_adapted and rest == "weight" else ()
        found[name.replace(".base_layer", "")] = (parameter, *pair)
    return found


def _buckets(
    zero: ZeroModel, layout: CheckpointLayout, live: dict[str, tuple[nn.Parameter, ...]], bucket_bytes: int
) -> Iterator[list[StateTensor]]:
    bucket: list[StateTensor] = []
    filled = 0
    for entry in layout.tensors:
        size = _num_bytes(zero, live.get(entry.key, ()))
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(entry)
        filled += size
    if bucket:
        yield bucket


def _num_bytes(zero: ZeroModel, parameters: Iterable[nn.Parameter]) -> int:
    return sum(zero.whole_numel(parameter) * parameter.element_size() for parameter in parameters)
