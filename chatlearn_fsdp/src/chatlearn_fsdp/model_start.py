"""The model of one rank, ready to train: a single rank loads it whole, several ranks read it slice by slice."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from chatlearn_core.exceptions import ModelError
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_fsdp.engine_arguments import check_engine_arguments
from chatlearn_fsdp.layouts import tensor_problems
from chatlearn_fsdp.options import FSDPOptions
from chatlearn_fsdp.sharding import RankGroup, copy_whole, local_box, shard_model
from chatlearn_fsdp.shards import held_boxes
from chatlearn_fsdp.tensor_parallel import split_layers
from chatlearn_hf.checkpoint_names import CheckpointLayout, checkpoint_layout, takes_tensors
from chatlearn_hf.forward_check import loaded_attention, with_attention
from chatlearn_hf.heads import drawn_head, load_model
from chatlearn_hf.lora import LoraSettings, base_state, draw_adapters
from chatlearn_hf.meta_start import CheckpointFiles, build_on_meta, local_directory, restore_buffers
from chatlearn_hf.model_directory import load_config, wrong_weights
from chatlearn_hf.packed_forward import PackedModel, decoder_layers
from chatlearn_hf.training_model import log_noise, training_model
from chatlearn_hf.ulysses import UlyssesGroup, check_heads
from chatlearn_trainer_kit.offload import own_storage
from chatlearn_trainer_kit.weight_loader import blend

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StartedModel:
    """A model with memory and values, sharded if there are several ranks."""

    packed: PackedModel
    layout: CheckpointLayout
    """Layout of the model without adapters."""


def start_model(
    options: FSDPOptions, context: RoleContext, source: ModelSource, ranks: RankGroup | None
) -> StartedModel:
    """Build, shard and load the model, and inject its adapters.

    With ``ranks`` the structure is built on the ``meta`` device and sharded, and every rank reads its own part of each
    tensor from the safetensors files, so no process holds the whole model. (If an architecture stores a tensor in a
    form without views of its checkpoint tensors, every rank first loads the whole model, with a warning.)

    Raises:
        ModelError: the directory is unusable, or the model cannot be split over Ulysses or tensor parallel ranks.
        ConfigError: an engine argument does not exist in the model's configuration.
    """
    extra = dict(context.engine_arguments)
    if extra:
        fields = load_config(source.path, trust_remote_code=source.trust_remote_code)
        names = {*fields.to_dict(), *fields.attribute_map}
        check_engine_arguments(context.role, extra, {name for name in names if not name.startswith("_")})
    if options.experts != "auto":
        extra["experts_implementation"] = options.experts
    settings: dict[str, Any] = {
        "dtype": getattr(torch, options.master_dtype),
        "trust_remote_code": source.trust_remote_code,
    } | extra
    if ranks is None:
        model = with_attention(
            options.attention,
            lambda attention: load_model(
                source.path,
                source.head,
                device=context.device,
                seed=context.seed,
                attention=attention,
                **settings,
            ),
        )
        layout = checkpoint_layout(model)
        packed = _prepare(model, options, context, source)
        for parameter in model.parameters():
            own_storage(parameter)
        draw_new_adapters(model, options, context)
        return StartedModel(packed, layout)

    directory = local_directory(source.path)
    model = with_attention(
        options.attention,
        lambda attention: build_on_meta(directory, source.head, attention=attention, **settings),
    )
    if isinstance(ranks.sharing, UlyssesGroup):
        check_heads(int(model.config.get_text_config().num_attention_heads), ranks.sharing.size)
    if problems := tensor_problems(options, model.config.to_dict(), ranks.size):
        raise ModelError(f"roles.{context.role} ({source.path}): {'; '.join(problems)}")
    layout = checkpoint_layout(model)
    by_slices = takes_tensors(layout)
    if not by_slices:
        odd = next(entry.key for entry in layout.tensors if entry.parts is None or not entry.shape)
        logger.warning(
            "%s stores %s in another form than its checkpoint, so each rank loads the whole model before sharding",
            type(model).__name__,
            odd,
        )
        attention = loaded_attention(model)
        model = load_model(source.path, source.head, device="cpu", seed=context.seed, attention=attention, **settings)
    packed = _prepare(model, options, context, source)
    compute, master = getattr(torch, options.param_dtype), getattr(torch, options.master_dtype)
    if not by_slices:
        packed.to(context.device)
    layers = decoder_layers(model)
    if ranks.tensor_mesh is not None:
        split_layers(layers, ranks.tensor_mesh)
    shard_model(
        packed,
        layers,
        ranks.mesh,
        ranks.layer_mesh,
        compute_dtype=compute if compute != master else None,
        cpu_offload=options.cpu_offload,
        gathers_once=options.gathers_once,
        also_forward=("alone",),
    )
    if by_slices:
        packed.to_empty(device="cpu" if options.cpu_offload else context.device)
        # to_empty gives the two names of a tied pair separate memory.
        model.tie_weights()
        restore_buffers(model)
        if options.cpu_offload:
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(context.device))
        read_shards(model, layout, directory, source, context.seed)
    draw_new_adapters(model, options, context)
    return StartedModel(packed, layout)


def read_shards(
    model: PreTrainedModel,
    layout: CheckpointLayout,
    directory: Path,
    source: ModelSource,
    seed: int,
    decay: float = 0.0,
) -> None:
    """Fill the live shards from the checkpoint files; draw a missing head from ``seed``.

    Args:
        model: live model.
        layout: layout of the model without adapters.
        directory: local model directory.
        source: for its head, and its path in messages.
        seed: seed of a new head.
        decay: see ``blend``.

    Raises:
        ModelError: tensors are missing or have a wrong shape.
    """
    state = base_state(model)
    with CheckpointFiles(directory) as files, torch.no_grad():
        missing, misshapen = files.differences(layout, source.head)
        if missing or misshapen:
            raise wrong_weights(source.path, missing, misshapen)
        new: dict[str, tuple[int, ...]] = {}
        for entry in layout.tensors:
            for held in held_boxes(entry, *local_box(state[entry.key].detach())):
                name = files.source(held.name, layout)
                if name is not None:
                    blend(files.box(name, held.box), held.view, decay)
            if any(files.source(name, layout) is None for name in entry.names):
                new[entry.key] = entry.shape
        for key, values in drawn_head(new, seed).items():
            copy_whole(values, state[key])


def read_model(
    model: PreTrainedModel, layout: CheckpointLayout, source: ModelSource, context: RoleContext, decay: float
) -> None:
    """Fill a live model from another directory of its architecture; each rank reads only its own part where possible.

    Args:
        model: live model.
        layout: layout of the model without adapters.
        source: the directory to read.
        context: the role's context.
        decay: fraction of each weight that is kept; see ``blend``.

    Raises:
        ModelError: tensors are missing or have a wrong shape; the model is unchanged.
    """
    if takes_tensors(layout):
        read_shards(model, layout, local_directory(source.path), source, context.seed, decay)
        return
    state = base_state(model)
    found = load_model(
        source.path, source.head, device="cpu", seed=context.seed, trust_remote_code=source.trust_remote_code
    ).state_dict()
    keys = [(entry.key, entry.shape) for entry in layout.tensors]
    missing = [key for key, _ in keys if key not in found]
    misshapen = [key for key, shape in keys if key in found and tuple(found[key].shape) != shape]
    if missing or misshapen:
        raise wrong_weights(source.path, missing, misshapen)
    for key, _ in keys:
        copy_whole(found[key], state[key], decay)


def _prepare(model: PreTrainedModel, options: FSDPOptions, context: RoleContext, source: ModelSource) -> PackedModel:
    lora = LoraSettings.of(options.lora) if options.lora is not None else None
    packed = training_model(
        model,
        source.head,
        trainable=context.trainable,
        lora=lora,
        gradient_checkpointing=options.gradient_checkpointing,
        logits_chunk_tokens=options.logits_chunk_tokens,
        distribution="chatlearn-fsdp",
    )
    if context.trainable and context.rank == 0:
        lora_dropout = lora.dropout if lora is not None else 0.0
        log_noise(model, context.role, source.path, dropout=options.dropout, lora_dropout=lora_dropout)
    return packed


def draw_new_adapters(model: PreTrainedModel, options: FSDPOptions, context: RoleContext) -> None:
    """Set the adapters, if any, to their initial values."""
    if options.lora is not None:
        draw_adapters(model, context.seed, copy_whole)
