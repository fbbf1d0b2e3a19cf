"""Between a model's own tensors and the names and shapes its checkpoint has.

A transformers model may hold several checkpoint tensors fused in one parameter (the experts of a mixture), share one
tensor under two names (a tied head), or rename. Checkpoint names are what ``save_pretrained`` writes. This module
derives the correspondence from transformers' own conversion mapping and makes both directions of it.

``transformers.core_model_loading`` is not a public interface; what is used of it is here and nowhere else, for
transformers >= 5.16.1, < 5.20.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from chatlearn_core.exceptions import ModelError, WeightSyncError
from chatlearn_core.types import TensorSpec, WeightManifest
from chatlearn_hf.heads import HEAD_CLASSES
from chatlearn_hf.model_directory import load_config, read_config_file, weight_files

SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


@dataclass(slots=True, frozen=True)
class Part:
    """Where a checkpoint tensor lies inside a fused parameter: a chunk along one dimension, then one row of another."""

    chunk: tuple[int, int, int] | None = None
    """(dimension, number of chunks, which)"""
    row: tuple[int, int] | None = None
    """(dimension, index); the dimension is dropped."""

    def view(self, fused: Tensor) -> Tensor:
        """The part of ``fused``, sharing its memory."""
        if self.chunk is not None:
            dimension, count, index = self.chunk
            fused = fused.chunk(count, dim=dimension)[index]
        if self.row is not None:
            fused = fused.select(*self.row)
        return fused


@dataclass(slots=True, frozen=True)
class StateTensor:
    """One tensor of a model's state and the checkpoint tensors it holds."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parts: tuple[Part, ...] | None
    """Where each name lies; None if they cannot be had as views (a transposition, a permutation)."""


@dataclass(slots=True, frozen=True)
class CheckpointLayout:
    """The correspondence between a model's state and its checkpoint, in the order of the state."""

    tensors: tuple[StateTensor, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """tied name -> name that is written"""

    def manifest(self, dtype: torch.dtype | None = None) -> WeightManifest:
        """Every checkpoint tensor, in the model's own dtypes or all floating ones in ``dtype``."""
        specs: dict[str, TensorSpec] = {}
        for entry in self.tensors:
            kind = dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype
            for name, shape in zip(entry.names, entry.shapes, strict=True):
                specs[name] = TensorSpec(name, shape, dtype_name(kind))
        return WeightManifest(specs, dict(self.aliases))


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def checkpoint_layout(model: PreTrainedModel) -> CheckpointLayout:
    """Derive the correspondence from the model's state dictionary; touches no values, so ``meta`` models work.

    Derive it before parameters are sharded, from whole shapes.
    """
    state = model.state_dict()
    aliases = _tied_names(model, state)
    converters, renamings = _reverse_conversions(model)
    tensors: list[StateTensor] = []
    renamed: dict[str, str] = {}
    for key, tensor in state.items():
        if key in aliases:
            continue
        shell = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        reverted = revert_weight_conversion(model, {key: shell}) if converters or renamings else {key: shell}
        names = tuple(reverted)
        shapes = tuple(tuple(value.shape) for value in reverted.values())
        parts = _parts(key, tensor, shapes, converters, renamings)
        tensors.append(StateTensor(key, tuple(tensor.shape), tensor.dtype, names, shapes, parts))
        renamed[key] = names[0]
    return CheckpointLayout(tuple(tensors), {alias: renamed[source] for alias, source in aliases.items()})


def expected_manifest(path_or_model: str | Path | PreTrainedModel, dtype: torch.dtype | None = None) -> WeightManifest:
    """What a weight stream for this model must hold.

    For a directory it is read from the headers of its safetensors files (no weights are loaded), with tied names taken
    from the architecture; for a hub id from the architecture alone.

    Args:
        path_or_model: a directory, a hub id or a model.
        dtype: of floating tensors on arrival; None takes those of the files or the model.

    Raises:
        ModelError: the directory cannot be used.
    """
    if isinstance(path_or_model, PreTrainedModel):
        return checkpoint_layout(path_or_model).manifest(dtype)
    directory = Path(path_or_model).expanduser()
    if not directory.is_dir():
        return checkpoint_layout(_shell(str(path_or_model))).manifest(dtype)
    read_config_file(directory)
    specs: dict[str, TensorSpec] = {}
    for file in weight_files(directory):
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118  # a safetensors handle cannot be iterated
                    header = handle.get_slice(name)
                    kind = SAFETENSORS_DTYPES.get(header.get_dtype(), header.get_dtype().lower())
                    if dtype is not None and ("float" in kind):
                        kind = dtype_name(dtype)
                    specs[name] = TensorSpec(name, tuple(header.get_shape()), kind)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is cut short or not a safetensors file: {error}. Export it again.") from error
    aliases = {
        alias: name for alias, name in checkpoint_layout(_shell(str(directory))).aliases.items() if name in specs
    }
    # A checkpoint may hold both names of a tied pair; the stream carries the tensor once.
    return WeightManifest({name: spec for name, spec in specs.items() if name not in aliases}, aliases)


def checkpoint_tensors(model: PreTrainedModel, layout: CheckpointLayout | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model under its checkpoint name, as ``save_pretrained`` would write it.

    Tensors share the model's memory wherever that is possible and carry no gradient.
    """
    layout = layout if layout is not None else checkpoint_layout(model)
    state = model.state_dict()
    for entry in layout.tensors:
        yield from state_tensor_parts(model, entry, state[entry.key])


def state_tensor_parts(model: PreTrainedModel, entry: StateTensor, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The checkpoint tensors inside one whole state tensor."""
    tensor = tensor.detach()
    if entry.parts is None:
        reverted: dict[str, Tensor] = revert_weight_conversion(model, {entry.key: tensor})
        return list(reverted.items())
    return [
        (name, part.view(tensor).view(shape))
        for name, part, shape in zip(entry.names, entry.parts, entry.shapes, strict=True)
    ]


def checkpoint_views(model: PreTrainedModel, layout: CheckpointLayout | None = None) -> dict[str, Tensor]:
    """Checkpoint name -> view of the model's own memory: writing to it changes the model. Tied names are included.

    Raises:
        WeightSyncError: the architecture keeps a tensor in a form that has no such view.
    """
    layout = layout if layout is not None else checkpoint_layout(model)
    without = [entry.key for entry in layout.tensors if entry.parts is None]
    if without:
        raise WeightSyncError(
            f"{type(model).__name__} keeps {', '.join(without[:4])} in a form that cannot be written in place under"
            " checkpoint names; load a saved checkpoint instead (weight_sync.backend: checkpoint)."
        )
    state = model.state_dict()
    views = {
        name: view for entry in layout.tensors for name, view in state_tensor_parts(model, entry, state[entry.key])
    }
    return views | {alias: views[name] for alias, name in layout.aliases.items()}


def load_checkpoint_tensors(
    model: PreTrainedModel,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    strict_names: bool = True,
    views: Mapping[str, Tensor] | None = None,
) -> set[str]:
    """Write checkpoint tensors into the model in place, fusing experts; dtype and device are converted.

    Args:
        model: the model.
        tensors: (checkpoint name, whole tensor), in any order.
        strict_names: refuse names the model does not have.
        views: from ``checkpoint_views``, to save deriving them on every call.

    Returns:
        The names that were loaded.

    Raises:
        WeightSyncError: an unknown name or a wrong shape; tensors before it have been written.
    """
    targets = views if views is not None else checkpoint_views(model)
    loaded: set[str] = set()
    for name, tensor in tensors:
        target = targets.get(name)
        if target is None:
            if not strict_names:
                continue
            raise WeightSyncError(
                f"{type(model).__name__} has no tensor {name!r}; names must be those save_pretrained writes, such as"
                f" {next(iter(targets), 'none')!r}."
            )
        if target.shape != tensor.shape:
            raise WeightSyncError(
                f"{name}: shape {list(tensor.shape)} arrived, {type(model).__name__} needs {list(target.shape)}"
            )
        with torch.no_grad():
            target.copy_(tensor)
        loaded.add(name)
    return loaded


def _tied_names(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, str]:
    """Tied state key -> key of the tensor it shares, as the architecture declares it."""
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return {}
    tied: Mapping[str, str] = model.all_tied_weights_keys
    return {alias: source for alias, source in tied.items() if alias in state and source in state}


def _reverse_conversions(model: PreTrainedModel) -> tuple[list[WeightConverter], list[WeightRenaming]]:
    """The conversions that saving applies, as ``revert_weight_conversion`` chooses them."""
    conversions: list[Any] | None = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = [
            entry
            for entry in get_model_conversion_mapping(model, add_legacy=False)
            if not isinstance(entry, PrefixChange)
        ]
    reverse = [entry.reverse_transform() for entry in reversed(conversions)]
    return (
        [entry for entry in reverse if isinstance(entry, WeightConverter)],
        [entry for entry in reverse if isinstance(entry, WeightRenaming)],
    )


def _parts(
    key: str,
    tensor: Tensor,
    shapes: tuple[tuple[int, ...], ...],
    converters: list[WeightConverter],
    renamings: list[WeightRenaming],
) -> tuple[Part, ...] | None:
    """Where the reverted tensors of one state tensor lie in it, in the order in which they are reverted."""
    pattern = rename_source_key(key, renamings, converters, reverse=True)[1] if converters else None
    if pattern is None:
        return (Part(),)
    reverse = next(entry for entry in converters if pattern in entry.source_patterns)
    merge = cat = None
    # The operations that loading applies: first merge the experts of each projection, then join the projections.
    for operation in (entry.reverse_op for entry in reversed(reverse.operations)):
        if isinstance(operation, MergeModulelist) and merge is None and cat is None:
            merge = operation.dim
        elif isinstance(operation, Concatenate) and cat is None:
            cat = operation.dim
        else:
            return None
    chunks: list[tuple[int, int, int] | None] = [None]
    if cat is not None:
        count = len(reverse.target_patterns)
        chunks = [(cat, count, index) for index in range(count)]
    rows: list[tuple[int, int] | None] = [None]
    if merge is not None:
        rows = [(merge, index) for index in range(tensor.shape[merge])]
    parts = tuple(Part(chunk, row) for chunk in chunks for row in rows)
    shell = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    agrees = len(parts) == len(shapes) and all(
        part.view(shell).numel() == torch.Size(shape).numel() for part, shape in zip(parts, shapes, strict=True)
    )
    return parts if agrees else None


def _shell(path: str) -> PreTrainedModel:
    """A model of the directory's architecture without values."""
    config = load_config(path)
    named = set(config.architectures or ())
    chosen: Any = AutoModelForCausalLM
    for auto_class in HEAD_CLASSES.values():
        mapping = auto_class._model_mapping
        if type(config) in mapping and mapping[type(config)].__name__ in named:
            chosen = auto_class
    with torch.device("meta"):
        shell: PreTrainedModel = chosen.from_config(config)
    return shell
