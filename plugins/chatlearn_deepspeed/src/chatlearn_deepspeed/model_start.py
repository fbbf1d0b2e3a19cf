"""Loads the model of one rank, and reads other model directories tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_core.types import WeightManifest
from chatlearn_deepspeed.options import DeepSpeedOptions
from chatlearn_hf.checkpoint_names import CheckpointLayout, checkpoint_layout, takes_tensors
from chatlearn_hf.forward_check import with_attention
from chatlearn_hf.heads import drawn_head, load_model
from chatlearn_hf.lora import LoraSettings, draw_adapters
from chatlearn_hf.meta_start import CheckpointFiles, local_directory
from chatlearn_hf.model_directory import wrong_weights
from chatlearn_hf.packed_forward import PackedModel
from chatlearn_hf.training_model import log_noise, training_model
from chatlearn_hf.ulysses import check_heads
from chatlearn_hf.weight_export import adapter_manifest
from chatlearn_trainer_kit.offload import own_storage


@dataclass(slots=True)
class StartedModel:
    """A whole model with values, before ZeRO shards it."""

    packed: PackedModel
    layout: CheckpointLayout
    """Layout of the model without adapters."""
    adapter_manifest: WeightManifest | None


def start_model(options: DeepSpeedOptions, context: RoleContext, source: ModelSource) -> StartedModel:
    """Load the model on this rank, and inject its adapters. With ZeRO-3 it is loaded on the host.

    Raises:
        ModelError: the directory is unusable, or the heads cannot be split over Ulysses ranks.
    """
    extra: dict[str, Any] = {} if options.experts == "auto" else {"experts_implementation": options.experts}
    model = with_attention(
        options.attention,
        lambda attention: load_model(
            source.path,
            source.head,
            device="cpu" if options.zero_stage == 3 else context.device,
            seed=context.seed,
            attention=attention,
            dtype=getattr(torch, options.param_dtype),
            trust_remote_code=source.trust_remote_code,
            **extra,
        ),
    )
    if options.ulysses > 1:
        check_heads(int(model.config.get_text_config().num_attention_heads), options.ulysses)
    layout = checkpoint_layout(model)
    lora = LoraSettings.of(options.lora) if options.lora is not None else None
    packed = training_model(
        model,
        source.head,
        trainable=context.trainable,
        lora=lora,
        gradient_checkpointing=options.gradient_checkpointing,
        logits_chunk_tokens=options.logits_chunk_tokens,
        distribution="chatlearn-deepspeed",
    )
    if context.trainable and context.rank == 0:
        lora_dropout = lora.dropout if lora is not None else 0.0
        log_noise(model, context.role, source.path, dropout=options.dropout, lora_dropout=lora_dropout)
    for parameter in model.parameters():
        own_storage(parameter)
    manifest: WeightManifest | None = None
    if lora is not None:
        draw_adapters(model, context.seed, _copy)
        manifest = adapter_manifest(model, lora)
    return StartedModel(packed, layout, manifest)


def stored_tensors(layout: CheckpointLayout, source: ModelSource, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the state tensors of a model directory, whole and one at a time; a missing head is drawn from ``seed``.

    (If an architecture stores a tensor in another form than its checkpoint, the model is loaded whole first.)

    Raises:
        ModelError: tensors are missing or have a wrong shape; raised before the first tensor.
    """
    if not takes_tensors(layout):
        found = load_model(
            source.path, source.head, device="cpu", seed=seed, trust_remote_code=source.trust_remote_code
        ).state_dict()
        keys = [(entry.key, entry.shape) for entry in layout.tensors]
        missing = [key for key, _ in keys if key not in found]
        misshapen = [key for key, shape in keys if key in found and tuple(found[key].shape) != shape]
        if missing or misshapen:
            raise wrong_weights(source.path, missing, misshapen)
        yield from ((key, found[key]) for key, _ in keys)
        return
    with CheckpointFiles(local_directory(source.path)) as files:
        missing, misshapen = files.differences(layout, source.head)
        if missing or misshapen:
            raise wrong_weights(source.path, missing, misshapen)
        new: dict[str, tuple[int, ...]] = {}
        for entry in layout.tensors:
            names = [files.source(name, layout) for name in entry.names]
            if None in names:
                new[entry.key] = entry.shape
                continue
            assert entry.parts is not None, "checked above"
            whole: Tensor | None = None
            for name, part, shape in zip(names, entry.parts, entry.shapes, strict=True):
                assert name is not None, "checked above"
                rows = files.rows(name, 0, shape[0])
                if whole is None:
                    whole = torch.empty(entry.shape, dtype=rows.dtype)
                part.view(whole).view(shape).copy_(rows)
            assert whole is not None, "a state tensor has a name"
            yield entry.key, whole
        yield from drawn_head(new, seed).items()


def new_adapters(model: PreTrainedModel, seed: int) -> dict[str, Tensor]:
    """Draw the initial values of all adapters, by live parameter name; the adapters must be whole."""
    names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    drawn: dict[str, Tensor] = {}

    def keep(values: Tensor, target: Tensor) -> None:
        drawn[names[target.data_ptr()]] = values

    draw_adapters(model, seed, keep)
    return drawn


def _copy(values: Tensor, target: Tensor) -> None:
    with torch.no_grad():
        target.copy_(values)
