"""Reads, streams and exports weights under checkpoint names, through the pieces that each rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from chatlearn_core.exceptions import ModelError
from chatlearn_core.protocols import ModelSource
from chatlearn_core.types import Box, WeightManifest, WeightShard
from chatlearn_core.types.boxes import extent, full_box
from chatlearn_hf.generation_end import stop_at_end_of_turn
from chatlearn_hf.heads import drawn_head
from chatlearn_hf.lora import adapter_names, drawn_downs
from chatlearn_hf.meta_start import CheckpointFiles, local_directory
from chatlearn_hf.model_directory import load_tokenizer, wrong_weights
from chatlearn_hf.progress_bars import no_progress_bars
from chatlearn_hf.weight_export import EXPORT_OWNER
from chatlearn_megatron.model import MegatronModel
from chatlearn_megatron.pieces import Piece


@dataclass(slots=True, frozen=True)
class Holders:
    """Which rank streams which part: the first of those that hold a copy of it. The same on every rank."""

    of_tensor: Mapping[str, tuple[tuple[int, Box], ...]]
    """Checkpoint name, or peft's name -> (rank, box), which together cover the tensor once."""

    def streams(self, rank: int, piece: Piece) -> bool:
        """Whether this rank is the first that holds the piece."""
        return (rank, piece.box) in self.of_tensor[piece.name]


def find_holders(model: MegatronModel) -> Holders:
    """Exchange which rank holds what. Collective.

    Raises:
        ModelError: a part of a checkpoint tensor lies in no parameter, or in two that differ: such a model would lose
            weights when it is exported.
    """
    shapes = model.shapes | model.adapter_shapes
    own = [(piece.name, piece.box) for piece in (*model.pieces(), *model.adapter_pieces())]
    every: list[list[tuple[str, Box]] | None] = [own]
    if model.ranks.size > 1:
        every = [None] * model.ranks.size
        dist.all_gather_object(every, own)
    first: dict[tuple[str, Box], int] = {}
    for rank, held in enumerate(every):
        for key in held or ():
            first.setdefault(key, rank)
    found: dict[str, list[tuple[int, Box]]] = {name: [] for name in shapes}
    for (name, box), rank in first.items():
        found[name].append((rank, box))
    wrong = [
        f"{name} {list(shape)}: {sum(torch.Size(extent(box)).numel() for _, box in found[name])} elements"
        for name, shape in shapes.items()
        if sum(torch.Size(extent(box)).numel() for _, box in found[name]) != torch.Size(shape).numel()
    ]
    if wrong:
        raise ModelError(
            f"the parameters of the trainer 'megatron' hold other parts of a {model.hf.config.model_type} checkpoint"
            f" than all of it: {'; '.join(wrong[:4])}" + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        )
    return Holders({name: tuple(boxes) for name, boxes in found.items()})


def read_weights(model: MegatronModel, source: ModelSource, seed: int, decay: float = 0.0) -> None:
    """Fill the parameters from a model directory; each rank reads only its own parts. A missing head is drawn.

    Args:
        model: live model.
        source: the directory to read.
        seed: seed of a new head.
        decay: fraction of each weight that is kept.

    Raises:
        ModelError: tensors are missing or have a wrong shape; the model is unchanged.
    """
    with CheckpointFiles(local_directory(source.path)) as files, torch.no_grad():
        missing, misshapen = files.differences(model.layout, source.head)
        if missing or misshapen:
            raise wrong_weights(source.path, missing, misshapen)
        drawn: dict[str, Tensor] | None = None
        for piece in model.pieces():
            name = files.source(piece.name, model.layout)
            if name is not None:
                piece.copy_(files.box(name, piece.box), decay)
                continue
            if drawn is None:
                heads = {
                    name: shape for name, shape in model.shapes.items() if files.source(name, model.layout) is None
                }
                drawn = drawn_head(heads, seed)
            piece.copy_(drawn[piece.name])


def draw_adapters(model: MegatronModel, seed: int) -> None:
    """Set the adapters, if any, to their initial values, which depend on ``seed`` and the model only."""
    held: dict[str, list[Piece]] = {}
    for piece in model.adapter_pieces():
        held.setdefault(piece.name, []).append(piece)
    names = adapter_names(model.hf)
    with torch.no_grad():
        for weight, down in drawn_downs(model.hf, seed):
            for piece in held.get(names[weight][0], ()):
                piece.copy_(down[tuple(slice(first, last) for first, last in piece.box)])
            for piece in held.get(names[weight][1], ()):
                piece.view.zero_()


def manifest_of(model: MegatronModel) -> WeightManifest:
    """Return the specs of all checkpoint tensors."""
    return model.layout.manifest(model.config.params_dtype)


def stream_boxes(model: MegatronModel, holders: Holders) -> Iterator[WeightShard]:
    """Yield the parts that this rank is the first to hold, with adapters merged, without communication; those of all
    ranks cover every tensor once.
    """
    rank, shapes, dtype = model.ranks.rank, model.shapes, model.config.params_dtype
    seen: set[tuple[str, Box]] = set()
    for piece in model.pieces():
        if holders.streams(rank, piece) and (piece.name, piece.box) not in seen:
            seen.add((piece.name, piece.box))
            yield WeightShard(piece.name, shapes[piece.name], piece.box, rank, piece.merged().to(dtype))


def stream_full(model: MegatronModel, holders: Holders) -> Iterator[WeightShard]:
    """Yield whole tensors with adapters merged, gathered one at a time, on every rank in the manifest's order.
    Collective.

    Every rank has the gathered tensors, so sending is spread: a tensor's owner is the rank that owns the fewest bytes
    so far, the lowest of several.
    """
    owned = [0] * model.ranks.size
    for name, whole in _gathered(model, holders, model.shapes, model.pieces()):
        owner = owned.index(min(owned))
        owned[owner] += whole.nbytes
        shape = tuple(whole.shape)
        yield WeightShard(name, shape, full_box(shape), owner, whole)


def stream_adapter(model: MegatronModel, holders: Holders) -> Iterator[WeightShard]:
    """Yield the adapters' whole tensors under peft's names, on every rank in the manifest's order. Collective."""
    for name, whole in _gathered(model, holders, model.adapter_shapes, model.adapter_pieces()):
        shape = tuple(whole.shape)
        yield WeightShard(name, shape, full_box(shape), EXPORT_OWNER, whole)


def _gathered(
    model: MegatronModel, holders: Holders, shapes: Mapping[str, tuple[int, ...]], pieces: Iterable[Piece]
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors in the order of ``shapes``, put together of the pieces of all ranks."""
    ranks, dtype = model.ranks, model.config.params_dtype
    held = {(piece.name, piece.box): piece for piece in pieces}
    device = next(model.parameters()).device
    for name, shape in shapes.items():
        boxes = holders.of_tensor[name]
        if ranks.size == 1 and len(boxes) == 1:
            whole = held[name, boxes[0][1]].merged().to(dtype)
        else:
            whole = torch.empty(shape, dtype=dtype, device=device)
            for holder, box in boxes:
                part = held[name, box].merged().to(dtype) if ranks.rank == holder else None
                if ranks.size > 1:
                    part = (
                        part.contiguous() if part is not None else torch.empty(extent(box), dtype=dtype, device=device)
                    )
                    dist.broadcast(part, src=holder)
                assert part is not None, "a single rank holds everything"
                whole[tuple(slice(first, last) for first, last in box)] = part
        yield name, whole


def export_model(model: MegatronModel, holders: Holders, source: ModelSource, directory: Path) -> None:
    """Write ``config.json``, safetensors under checkpoint names with adapters merged, the tokenizer, and the stop
    tokens. Collective; rank 0 writes.
    """
    writes = model.ranks.rank == EXPORT_OWNER
    gathered: dict[str, Tensor] = {}
    for shard in stream_full(model, holders):
        if writes:
            gathered[shard.name] = shard.tensor.detach().to("cpu", copy=True).contiguous()
    if not writes:
        return
    directory.mkdir(parents=True, exist_ok=True)
    config = model.hf.config
    config.architectures = [type(model.hf).__name__]
    config.dtype = model.config.params_dtype
    config.save_pretrained(directory)
    if model.hf.generation_config is not None:
        model.hf.generation_config.save_pretrained(directory)
    with no_progress_bars():
        save_torch_state_dict(gathered, directory)
    tokenizer = load_tokenizer(source.tokenizer_path, trust_remote_code=source.trust_remote_code)
    tokenizer.save_pretrained(directory)
    stop_at_end_of_turn(directory, tokenizer)
