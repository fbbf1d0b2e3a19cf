"""Exports weights under checkpoint names, with adapters merged; ZeRO-3 gathers them by buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from chatlearn_core.types import WeightShard
from chatlearn_core.types.boxes import extent, full_box, num_elements
from chatlearn_deepspeed.fragments import Fragment, boxes_of_run, without_adapters
from chatlearn_deepspeed.zero import ZeroModel
from chatlearn_hf.checkpoint_names import CheckpointLayout, Part, StateTensor, state_tensor_parts
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


def stream_boxes(zero: ZeroModel, layout: CheckpointLayout, rank: int, num_ranks: int) -> Iterator[WeightShard]:
    """Yield the elements that this rank holds as boxes; those of all ranks cover every tensor once.

    ZeRO-3 gathers only tensors that are put together for a checkpoint, one at a time: those with an adapter, and those
    that hold several checkpoint tensors, such as the experts of a mixture. Their parts are spread over the ranks, as
    are all tensors of stages 1 and 2, where every rank has them whole. Collective.
    """
    model, live, fragments = zero.packed.model, _live_parameters(zero), without_adapters(zero.fragments())
    owned = [0] * num_ranks
    device = next(model.parameters()).device
    for entry in layout.tensors:
        is_plain = entry.parts == (Part(),) and bool(entry.shape) and len(live.get(entry.key, ())) <= 1
        if zero.stage == 3 and is_plain:
            if fragments[entry.key].is_first:
                yield from _held_boxes(entry, fragments[entry.key], rank, device)
            continue
        owner = owned.index(min(owned))
        owned[owner] += torch.Size(entry.shape).numel()
        with zero.gathered(live.get(entry.key, ())):
            mine = []
            if rank == owner:
                whole = _merged(model, entry)
                # Another rank's next gather must not wait until these are sent.
                mine = [
                    (name, part.clone() if zero.stage == 3 else part)
                    for name, part in state_tensor_parts(model, entry, whole)
                ]
        for name, part in mine:
            shape = tuple(part.shape)
            yield WeightShard(name, shape, full_box(shape), rank, part)


def _held_boxes(entry: StateTensor, fragment: Fragment, rank: int, device: torch.device) -> Iterator[WeightShard]:
    """Yield the run of elements that this rank holds of a tensor as boxes, in the dtype of the model's passes."""
    values, at = fragment.values.detach().to(device, entry.dtype), 0
    for box in boxes_of_run(entry.shape, fragment.start, fragment.stop):
        count = num_elements(box)
        yield WeightShard(entry.names[0], entry.shape, box, rank, values[at : at + count].view(extent(box)))
        at += count


@torch.no_grad()
def _merged(model: PreTrainedModel, entry: StateTensor) -> Tensor:
    """Return a gathered tensor with its adapter merged."""
    tensor, adapter = base_state(model)[entry.key].detach(), adapters(model).get(entry.key)
    return tensor if adapter is None else adapter.merge(tensor, adapter.down, adapter.up)


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
