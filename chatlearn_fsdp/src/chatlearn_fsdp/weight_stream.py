"""Weights on their way out: streams in checkpoint names, and Hugging Face model directories."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from chatlearn_core.protocols import ModelSource
from chatlearn_core.types import WeightShard
from chatlearn_hf.checkpoint_names import CheckpointLayout, state_tensor_parts
from chatlearn_hf.model_directory import load_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from chatlearn_fsdp.sharding import box_of_rows, full_box, local_rows, whole

EXPORT_OWNER = 0
"""The rank that sends gathered tensors."""


def stream_full(model: PreTrainedModel, layout: CheckpointLayout) -> Iterator[WeightShard]:
    """Whole tensors, gathered one at a time where they are sharded; every rank steps in the layout's order."""
    state = model.state_dict()
    for entry in layout.tensors:
        for name, tensor in state_tensor_parts(model, entry, whole(state[entry.key].detach())):
            shape = tuple(tensor.shape)
            yield WeightShard(name, shape, full_box(shape), EXPORT_OWNER, tensor)


def stream_boxes(model: PreTrainedModel, layout: CheckpointLayout, rank: int) -> Iterator[WeightShard]:
    """The rows this rank holds, as views of its shards; over all ranks they cover every tensor exactly once.

    A tensor that cannot be had as a view is gathered, and yielded whole by the owner.
    """
    state = model.state_dict()
    for entry in layout.tensors:
        tensor = state[entry.key].detach()
        if entry.parts is None or not entry.shape:
            gathered = whole(tensor)
            if rank == EXPORT_OWNER:
                for name, part in state_tensor_parts(model, entry, gathered):
                    yield WeightShard(name, tuple(part.shape), full_box(tuple(part.shape)), rank, part)
            continue
        local, start = local_rows(tensor)
        if not local.shape[0]:
            continue
        shell = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        row_elements = shell.stride(0)
        local = local.contiguous()
        for name, part_of, shape in zip(entry.names, entry.parts, entry.shapes, strict=True):
            part = part_of.view(shell).view(shape)
            first, last = box_of_rows(part, (start, start + local.shape[0]), row_elements)
            if first == last:
                continue
            offset = part.storage_offset() + first * part.stride(0) - start * row_elements
            held = local.as_strided((last - first, *shape[1:]), part.stride(), local.storage_offset() + offset)
            yield WeightShard(name, shape, ((first, last), *full_box(shape[1:])), rank, held)


def export_model(
    model: PreTrainedModel, layout: CheckpointLayout, source: ModelSource, directory: Path, rank: int
) -> None:
    """Write ``config.json``, safetensors under checkpoint names and the tokenizer. Collective; rank 0 writes."""
    state = model.state_dict()
    gathered: dict[str, Tensor] = {}
    for entry in layout.tensors:
        tensor = whole(state[entry.key].detach())
        if rank == EXPORT_OWNER:
            gathered[entry.key] = tensor.cpu()
    if rank != EXPORT_OWNER:
        return
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, state_dict=gathered)
    load_tokenizer(source.tokenizer_path, trust_remote_code=source.trust_remote_code).save_pretrained(directory)
