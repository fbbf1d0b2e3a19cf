"""Resumable checkpoints of one trainer, of plain tensors: nothing in them is executed when they are read.

Every rank writes ``shard_<rank>.safetensors`` with its fragments of weights and optimizer state, and its random state.
Any number of ranks at any ZeRO stage can read them, because a fragment says which elements of a whole tensor it is.
``trainer.json`` is written last, so a checkpoint without it is incomplete. With adapters the checkpoint contains only
what training changes: the adapters, and a value or reward head. (DeepSpeed's own checkpoints are pickled, and bound to
the number of ranks.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from chatlearn_core.exceptions import CheckpointError
from chatlearn_core.metrics.durable_files import file_facts
from chatlearn_core.types import FileFacts
from chatlearn_deepspeed.fragments import Fragment
from chatlearn_deepspeed.ranks import ZeroRanks
from chatlearn_deepspeed.zero import ZeroModel
from chatlearn_hf.checkpoint_names import CheckpointLayout
from chatlearn_trainer_kit.checkpoint_files import (
    TRAINER_FILE,
    random_file,
    random_state,
    read_pickle,
    read_record,
    set_random_state,
    unreadable,
    write_record,
)
from chatlearn_trainer_kit.options import LoraOptions

FORMAT = "deepspeed-1"
WEIGHTS, STARTS = "weights", "starts"


@dataclass(slots=True)
class TrainerState:
    """State to save and load; ``load`` writes into the live tensors and sets ``updates``."""

    zero: ZeroModel
    layout: CheckpointLayout
    head: str
    updates: int
    device: torch.device
    ranks: ZeroRanks
    rank: int
    lora: LoraOptions | None = None

    def fragments(self) -> dict[str, Fragment]:
        """Return the fragments to save, by the model's own names; with adapters only those that training changes."""
        found = self.zero.fragments()
        if self.lora is None:
            return found
        return {
            name: fragment
            for name, fragment in found.items()
            if ".lora_A." in name or ".lora_B." in name or name.startswith("score.")
        }

    def identity(self) -> dict[str, Any]:
        """Values that must agree between a checkpoint and the trainer that loads it."""
        return {
            "format": FORMAT,
            "architecture": self.zero.packed.model.config.model_type,
            "head": self.head,
            "parameters": sum(torch.Size(entry.shape).numel() for entry in self.layout.tensors),
            "lora": self.lora.model_dump(mode="json", include={"rank", "alpha", "target_modules"})
            if self.lora
            else None,
        }


def save(directory: Path, state: TrainerState) -> dict[str, FileFacts]:
    """Write a checkpoint and return the facts of this rank's files. Collective. The caller replaces older
    checkpoints.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    starts: dict[str, int] = {}
    for name, fragment in state.fragments().items():
        if not fragment.is_first or not fragment.values.numel():
            continue
        starts[name] = fragment.start
        kinds = {WEIGHTS: fragment.values, **fragment.moments, **fragment.scalars}
        for kind, tensor in kinds.items():
            tensors[f"{kind}:{name}"] = tensor.detach().to("cpu", copy=True)
    save_file(tensors, directory / _shard_file(state.rank), metadata={STARTS: json.dumps(starts)})
    torch.save(random_state(state.device), directory / random_file(state.rank))
    state.ranks.barrier()
    files = [_shard_file(state.rank), random_file(state.rank)]
    if state.rank == 0:
        write_record(
            directory,
            state.identity()
            | {
                "updates": state.updates,
                "trainable": state.zero.optimizer is not None,
                "world_size": state.ranks.size,
                "zero_stage": state.zero.stage,
            },
        )
        files.append(TRAINER_FILE)
    facts = file_facts(directory, files)
    state.ranks.barrier()
    return facts


def load(directory: Path, state: TrainerState) -> None:
    """Read a checkpoint into the live tensors. Collective.

    The random state is restored if as many ranks saved the checkpoint; otherwise it stays.

    Raises:
        CheckpointError: a file is missing, truncated, or of another model.
    """
    record = read_record(directory, state.identity())
    zero = state.zero
    state.updates, world_size = int(record["updates"]), int(record["world_size"])
    has_moments = bool(record["trainable"]) and state.updates > 0 and zero.optimizer is not None
    zero.clear_moments()
    if has_moments:
        zero.allocate_moments()
    with ExitStack() as stack:
        saved = _SavedFragments(directory, world_size, stack)
        for name, fragment in state.fragments().items():
            saved.read(WEIGHTS, name, fragment.start, fragment.values)
            if has_moments:
                for kind, moments in fragment.moments.items():
                    saved.read(kind, name, fragment.start, moments)
                for kind, scalar in fragment.scalars.items():
                    saved.read_scalar(kind, name, scalar)
    zero.refresh()
    file = directory / random_file(state.rank)
    if world_size == state.ranks.size:
        set_random_state(read_pickle(file), state.device, file)


class _SavedFragments:
    """The fragments in the files of all ranks.

    Args:
        directory: of the checkpoint.
        world_size: number of ranks that wrote it.
        stack: closes the files.
    """

    def __init__(self, directory: Path, world_size: int, stack: ExitStack) -> None:
        self._directory = directory
        self._places: dict[str, list[tuple[int, int, Any, Path]]] = {}
        for rank in range(world_size):
            file = directory / _shard_file(rank)
            try:
                shard: Any = stack.enter_context(safe_open(file, framework="pt"))
                starts: Mapping[str, Any] = json.loads((shard.metadata() or {})[STARTS])
                for name, start in starts.items():
                    size = shard.get_slice(f"{WEIGHTS}:{name}").get_shape()[0]
                    self._places.setdefault(name, []).append((int(start), int(start) + size, shard, file))
            except (SafetensorError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                raise unreadable(file, error) from error

    @torch.no_grad()
    def read(self, kind: str, name: str, start: int, target: Tensor) -> None:
        """Copy elements [start, start + n) of a tensor into ``target`` [n].

        Raises:
            CheckpointError: the checkpoint does not have all of them.
        """
        stop, found = start + target.numel(), 0
        for first, last, shard, file in self._places.get(name, ()):
            low, high = max(start, first), min(stop, last)
            if low >= high:
                continue
            try:
                values: Tensor = shard.get_slice(f"{kind}:{name}")[low - first : high - first]
            except SafetensorError as error:
                raise unreadable(file, error) from error
            target[low - start : high - start].copy_(values)
            found += high - low
        if found != target.numel():
            raise CheckpointError(
                f"{self._directory} has {found} of the {target.numel()} elements that this rank needs of {kind} of"
                f" {name}: it is of another model, or a file was replaced; use an earlier checkpoint"
            )

    @torch.no_grad()
    def read_scalar(self, kind: str, name: str, target: Tensor) -> None:
        """Copy state without dimensions into ``target``, from any fragment of the tensor."""
        for _, _, shard, file in self._places.get(name, ()):
            try:
                target.copy_(shard.get_tensor(f"{kind}:{name}"))
            except SafetensorError as error:
                raise unreadable(file, error) from error
            return
        raise CheckpointError(f"{self._directory} lacks {kind} of {name}: it is of another model")


def _shard_file(rank: int) -> str:
    return f"shard_{rank}.safetensors"
