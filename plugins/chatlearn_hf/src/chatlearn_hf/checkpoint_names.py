"""Maps a model's own tensors to the names and shapes of its checkpoint, and back.

A transformers model may hold several checkpoint tensors fused in one parameter (the experts of a mixture), share one
tensor under two names (a tied head), or rename tensors. Checkpoint names are those that ``save_pretrained`` writes.
This module derives the mapping from transformers' own conversion mapping.

``transformers.core_model_loading`` is not a public interface; only this module uses it, for transformers >= 5.16.1, <
5.20.
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
    """Position of a checkpoint tensor inside a fused parameter: a chunk along one dimension, then one row of another.

    Example: ``Part(chunk=(1, 2, 0), row=(0, 3))`` is the first half of expert 3, in a fused ``gate_up_proj``.
    """

    chunk: tuple[int, int, int] | None = None
    """(dimension, number of chunks, index of the chunk)"""
    row: tuple[int, int] | None = None
    """(dimension, index); the dimension is removed."""

    def view(self, fused: Tensor) -> Tensor:
        """Return this part of ``fused`` as a view."""
        if self.chunk is not None:
            dimension, count, index = self.chunk
            fused = fused.chunk(count, dim=dimension)[index]
        if self.row is not None:
            fused = fused.select(*self.row)
        return fused


@dataclass(slots=True, frozen=True)
class StateTensor:
    """One tensor of a model's state with the checkpoint tensors that it contains."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parts: tuple[Part, ...] | None
    """Position of each name; None if there is no view (a transposition, a permutation)."""


@dataclass(slots=True, frozen=True)
class CheckpointLayout:
    """The mapping between a model's state and its checkpoint, in the order of the state."""

    tensors: tuple[StateTensor, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """tied name -> name that is saved"""

    def manifest(self, dtype: torch.dtype | None = None) -> WeightManifest:
        """Return the specs of all checkpoint tensors, with floating dtypes replaced by ``dtype`` if it is given."""
        specs: dict[str, TensorSpec] = {}
        for entry in self.tensors:
            kind = dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype
            for name, shape in zip(entry.names, entry.shapes, strict=True):
                specs[name] = TensorSpec(name, shape, dtype_name(kind))
        return WeightManifest(specs, dict(self.aliases))


def takes_tensors(layout: CheckpointLayout) -> bool:
    """Whether every checkpoint tensor lies in the model as a view, so that each can be written alone."""
    return all(entry.parts is not None and entry.shape for entry in layout.tensors)


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def checkpoint_layout(model: PreTrainedModel) -> CheckpointLayout:
    """Derive the mapping from the shapes in the model's state dictionary; ``meta`` models work.

    Call it before parameters are sharded, because it needs whole shapes.
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
    """Return the manifest of all tensors that a weight stream for this model must contain.

    For a directory it reads the headers of the safetensors files (no weights), and takes tied names from the
    architecture; for a hub id it uses only the architecture.

    Args:
        path_or_model: a directory, a hub id or a model.
        dtype: dtype of floating tensors on arrival; None keeps the dtypes of the files or the model.

    Raises:
        ModelError: the directory is unusable.
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
            raise ModelError(f"{file} is truncated or not a safetensors file: {error}. Export it again.") from error
    aliases = {
        alias: name for alias, name in checkpoint_layout(_shell(str(directory))).aliases.items() if name in specs
    }
    # A checkpoint may contain both names of a tied pair; the stream sends the tensor once.
    return WeightManifest({name: spec for name, spec in specs.items() if name not in aliases}, aliases)


def checkpoint_tensors(model: PreTrainedModel, layout: CheckpointLayout | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the model under its checkpoint name, as ``save_pretrained`` would write it.

    Tensors share the model's memory where possible, and have no gradient.
    """
    layout = layout if layout is not None else checkpoint_layout(model)
    state = model.state_dict()
    for entry in layout.tensors:
        yield from state_tensor_parts(model, entry, state[entry.key])


def state_tensor_parts(model: PreTrainedModel, entry: StateTensor, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return the checkpoint tensors inside one whole state tensor."""
    tensor = tensor.detach()
    if entry.parts is None:
        reverted: dict[str, Tensor] = revert_weight_conversion(model, {entry.key: tensor})
        return list(reverted.items())
    return [
        (name, part.view(tensor).view(shape))
        for name, part, shape in zip(entry.names, entry.parts, entry.shapes, strict=True)
    ]


def checkpoint_views(model: PreTrainedModel, layout: CheckpointLayout | None = None) -> dict[str, Tensor]:
    """Return checkpoint name -> writable view of the model's memory, including tied names.

    Raises:
        WeightSyncError: the architecture stores a tensor in a form that has no such view.
    """
    layout = layout if layout is not None else checkpoint_layout(model)
    without = [entry.key for entry in layout.tensors if entry.parts is None]
    if without:
        raise WeightSyncError(
            f"{type(model).__name__} stores {', '.join(without[:4])} in a form that cannot be written in place under"
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
    """Write checkpoint tensors into the model in place, fusing experts and converting dtype and device.

    Args:
        model: the model.
        tensors: (checkpoint name, whole tensor), in any order.
        strict_names: whether to refuse names that the model does not have.
        views: result of ``checkpoint_views``, to avoid deriving it on every call.

    Returns:
        The names of the loaded tensors.

    Raises:
        WeightSyncError: a name is unknown or a shape is wrong; earlier tensors have been written.
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
    """Return tied state key -> key of the tensor it shares, as declared by the architecture."""
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return {}
    tied: Mapping[str, str] = model.all_tied_weights_keys
    return {alias: source for alias, source in tied.items() if alias in state and source in state}


def _reverse_conversions(model: PreTrainedModel) -> tuple[list[WeightConverter], list[WeightRenaming]]:
    """Return the conversions for saving, chosen as in ``revert_weight_conversion``."""
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
    """Return the positions of checkpoint tensors inside one state tensor, in the order of reversion; None without
    views.
    """
    pattern = rename_source_key(key, renamings, converters, reverse=True)[1] if converters else None
    if pattern is None:
        return (Part(),)
    reverse = next(entry for entry in converters if pattern in entry.source_patterns)
    merge = cat = None
    # Loading first merges the experts of each projection, then concatenates the projections.
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
    """Return a model of the directory's architecture on the ``meta`` device."""
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
