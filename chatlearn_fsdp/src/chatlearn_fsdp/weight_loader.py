"""Receives another trainer's weights: each rank copies the rows that its shards hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from chatlearn_core.types import WeightManifest, WeightShard
from chatlearn_core.types.boxes import full_box, overlap
from chatlearn_fsdp.sharding import local_rows
from chatlearn_fsdp.shards import HeldRows, held_rows
from chatlearn_hf.checkpoint_names import CheckpointLayout
from chatlearn_hf.lora import base_state
from chatlearn_trainer_kit.weight_loader import TrainerWeightLoader, blend


@dataclass(slots=True, frozen=True)
class LoadingHooks:
    """Functions of the trainer that a loader calls."""

    model: Callable[[], PreTrainedModel]
    """Returns the live model with its gathered parameters freed; raises if its weights cannot be written now."""
    taken: Callable[[], None]
    """Called when all weights have arrived: resets optimizer and adapters, as ``load_model`` does."""
    break_down: Callable[[str], None]
    """Called with a reason when loading failed midway: the weights may match no completed step."""


class ShardedWeightLoader(TrainerWeightLoader):
    """Copies arriving tensors into this rank's shards, without communication; every rank receives all tensors.

    Allocates at most one box at a time, in the dtype and on the device of the weights, and only to average.
    """

    def __init__(self, name: str, layout: CheckpointLayout, decay: float, hooks: LoadingHooks) -> None:
        """Create the loader; it accepts a sync at any time.

        Args:
            name: role and rank, for messages.
            layout: layout of the model without adapters; it must satisfy ``takes_tensors``.
            decay: see ``blend``.
            hooks: functions of the trainer.
        """
        manifest: WeightManifest = layout.manifest()
        super().__init__(name, manifest)
        self._layout = layout
        self._decay = decay
        self._hooks = hooks
        self._held: Mapping[str, HeldRows] = {}
        """In the open sync: for each tensor with rows on this rank, these live rows."""

    def _begin(self) -> None:
        state = base_state(self._hooks.model())
        held: dict[str, HeldRows] = {}
        for entry in self._layout.tensors:
            local, start = local_rows(state[entry.key].detach())
            held |= {rows.name: rows for rows in held_rows(entry, local, start)}
        self._held = held

    def _place(self, shard: WeightShard) -> None:
        held = self._held.get(shard.name)
        if held is None:
            return
        own = ((held.first, held.last), *full_box(held.shape[1:]))
        shared = overlap(shard.box, own)
        if shared is None:
            return
        source = shard.tensor[tuple(slice(a - b, c - b) for (a, c), (b, _) in zip(shared, shard.box, strict=True))]
        target = held.view[tuple(slice(a - b, c - b) for (a, c), (b, _) in zip(shared, own, strict=True))]
        with torch.no_grad():
            blend(source, target, self._decay)

    def _loaded(self) -> None:
        devices = {held.view.device for held in self._held.values() if held.view.is_cuda}
        for device in devices:
            torch.cuda.synchronize(device)  # the sender reuses the memory

    def _finish(self) -> None:
        self._held = {}
        self._hooks.taken()

    def _fail(self, reason: str) -> None:
        self._held = {}
        self._hooks.break_down(f"loading another trainer's weights failed midway ({reason})")
