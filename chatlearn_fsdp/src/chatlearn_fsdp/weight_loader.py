"""Receives another trainer's weights: each rank copies the boxes that its shards hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from chatlearn_core.types import WeightManifest, WeightShard
from chatlearn_core.types.boxes import Box, overlap, slices
from chatlearn_fsdp.sharding import local_box
from chatlearn_fsdp.shards import HeldBox, held_boxes
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
        self._held: Mapping[str, HeldBox] = {}
        """In the open sync: for each tensor with a part on this rank, this live part."""

    def _begin(self) -> None:
        state = base_state(self._hooks.model())
        held: dict[str, HeldBox] = {}
        for entry in self._layout.tensors:
            held |= {part.name: part for part in held_boxes(entry, *local_box(state[entry.key].detach()))}
        self._held = held

    def _place(self, shard: WeightShard) -> None:
        held = self._held.get(shard.name)
        if held is None:
            return
        shared = overlap(shard.box, held.box)
        if shared is None:
            return
        source = shard.tensor[slices(_inside(shared, shard.box))]
        target = held.view[slices(_inside(shared, held.box))]
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


def _inside(box: Box, outer: Box) -> Box:
    """Return where ``box`` lies in the tensor that is in ``outer``."""
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))
