"""Exports weights as streams under checkpoint names or as Hugging Face model directories, with adapters merged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chatlearn_core.protocols import ModelSource
from chatlearn_core.types import WeightShard
from chatlearn_core.types.boxes import full_box
from chatlearn_fsdp.sharding import is_first_copy, local_box, whole
from chatlearn_fsdp.shards import held_boxes
from chatlearn_hf.checkpoint_names import CheckpointLayout, StateTensor, state_tensor_parts
from chatlearn_hf.lora import Adapter, adapter_names, adapters, base_state
from chatlearn_hf.weight_export import EXPORT_OWNER, spread_over_ranks, write_model_directory


def stream_full(model: PreTrainedModel, layout: CheckpointLayout, num_ranks: int) -> Iterator[WeightShard]:
    """Yield whole tensors, gathered one at a time if sharded, on every rank in the layout's order; see
    ``spread_over_ranks``.
    """
    return spread_over_ranks(model, _whole_tensors(model, layout), num_ranks)


def stream_boxes(model: PreTrainedModel, layout: CheckpointLayout, rank: int) -> Iterator[WeightShard]:
    """Yield the boxes this rank holds, as views of its shards; over all ranks they cover every tensor exactly once.

    Of several copies (HSDP, buffers, norms of tensor parallel ranks) only the first is streamed. A tensor without views
    is gathered, and the owner yields it whole. Rows with an adapter are merged into new memory; for that the adapter's
    small A is gathered (and, for a transposed weight, its B).
    """
    state, adapter_of = base_state(model), adapters(model)
    for entry in layout.tensors:
        tensor = state[entry.key].detach()
        if entry.parts is None or not entry.shape:
            gathered = _merged(whole(tensor), adapter_of.get(entry.key))
            if rank == EXPORT_OWNER:
                for name, part in state_tensor_parts(model, entry, gathered):
                    yield WeightShard(name, tuple(part.shape), full_box(tuple(part.shape)), rank, part)
            continue
        local, place = local_box(tensor)
        adapter = adapter_of.get(entry.key)
        if adapter is not None and adapter.transposed:
            columns = whole(adapter.down)[:, slice(*place[0])]
            local = adapter.merge(local, columns, whole(adapter.up))
        elif adapter is not None:
            local = adapter.merge(local, whole(adapter.down), local_box(adapter.up)[0])
        if is_first_copy(tensor, rank):
            for held in held_boxes(entry, local.contiguous(), place):
                yield WeightShard(held.name, held.shape, held.box, rank, held.view)


def stream_adapter(model: PreTrainedModel) -> Iterator[WeightShard]:
    """Yield the adapters' tensors, gathered one at a time if sharded, on every rank in the same order."""
    adapter_of = adapters(model)
    for weight, names in adapter_names(model).items():
        for name, tensor in zip(names, (adapter_of[weight].down, adapter_of[weight].up), strict=True):
            gathered = whole(tensor)
            shape = tuple(gathered.shape)
            yield WeightShard(name, shape, full_box(shape), EXPORT_OWNER, gathered)


def export_model(
    model: PreTrainedModel, layout: CheckpointLayout, source: ModelSource, directory: Path, rank: int
) -> None:
    """Write ``config.json``, safetensors under checkpoint names, the tokenizer, and the stop tokens. Collective; rank 0
    writes.
    """
    write_model_directory(model, _whole_tensors(model, layout), source, directory, rank)


def _whole_tensors(model: PreTrainedModel, layout: CheckpointLayout) -> Iterator[tuple[StateTensor, Tensor]]:
    state, adapter_of = base_state(model), adapters(model)
    for entry in layout.tensors:
        yield entry, _merged(whole(state[entry.key].detach()), adapter_of.get(entry.key))


@torch.no_grad()
def _merged(weight: Tensor, adapter: Adapter | None) -> Tensor:
    return weight if adapter is None else adapter.merge(weight, whole(adapter.down), whole(adapter.up))
