"""Streams whole tensors under checkpoint names, and writes Hugging Face model directories."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chatlearn_core.protocols import ModelSource
from chatlearn_core.types import TensorSpec, WeightManifest, WeightShard
from chatlearn_core.types.boxes import full_box
from chatlearn_hf.checkpoint_names import StateTensor, dtype_name, state_tensor_parts
from chatlearn_hf.generation_end import stop_at_end_of_turn
from chatlearn_hf.lora import LoraSettings, adapter_config, adapter_names, adapters
from chatlearn_hf.model_directory import load_tokenizer
from chatlearn_hf.progress_bars import no_progress_bars

EXPORT_OWNER = 0
"""The rank that writes model directories, and that sends tensors which are not spread over ranks."""


def spread_over_ranks(
    model: PreTrainedModel, tensors: Iterable[tuple[StateTensor, Tensor]], num_ranks: int
) -> Iterator[WeightShard]:
    """Yield the checkpoint tensors inside whole state tensors, which every rank has.

    Sending is spread: a tensor's owner is the rank that owns the fewest bytes so far, the lowest of several. All ranks
    determine the same owner.
    """
    owned_bytes = [0] * num_ranks
    for entry, tensor in tensors:
        for name, part in state_tensor_parts(model, entry, tensor):
            shape, owner = tuple(part.shape), owned_bytes.index(min(owned_bytes))
            owned_bytes[owner] += part.nbytes
            yield WeightShard(name, shape, full_box(shape), owner, part)


def write_model_directory(
    model: PreTrainedModel,
    tensors: Iterable[tuple[StateTensor, Tensor]],
    source: ModelSource,
    directory: Path,
    rank: int,
) -> None:
    """Write ``config.json``, safetensors under checkpoint names, the tokenizer, and the stop tokens.

    Every rank consumes ``tensors``, which may be collective; rank 0 keeps them on the host and writes.
    """
    gathered: dict[str, Tensor] = {}
    for entry, tensor in tensors:
        if rank == EXPORT_OWNER:
            gathered[entry.key] = tensor.cpu()
    if rank != EXPORT_OWNER:
        return
    directory.mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        model.save_pretrained(directory, state_dict=gathered)
    tokenizer = load_tokenizer(source.tokenizer_path, trust_remote_code=source.trust_remote_code)
    tokenizer.save_pretrained(directory)
    stop_at_end_of_turn(directory, tokenizer)


def adapter_manifest(
    model: PreTrainedModel, settings: LoraSettings, dtype: torch.dtype | None = None
) -> WeightManifest:
    """Return the manifest of the adapters, by peft's names, with their configuration; ``dtype`` replaces theirs."""
    specs: dict[str, TensorSpec] = {}
    adapter_of = adapters(model)
    for weight, names in adapter_names(model).items():
        for name, tensor in zip(names, (adapter_of[weight].down, adapter_of[weight].up), strict=True):
            specs[name] = TensorSpec(name, tuple(tensor.shape), dtype_name(dtype or tensor.dtype))
    return WeightManifest(specs, adapter=adapter_config(model, settings))
