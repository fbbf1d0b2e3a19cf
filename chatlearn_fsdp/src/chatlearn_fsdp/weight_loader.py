"""Weights on their way in: another trainer's tensors, each put into the rows of it that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from chatlearn_core.types import WeightManifest, WeightShard
from chatlearn_core.types.boxes import overlap
from chatlearn_fsdp.sharding import blend, full_box, local_rows
from chatlearn_fsdp.shards import HeldRows, held_rows
from chatlearn_hf.checkpoint_names import CheckpointLayout
from chatlearn_hf.lora import base_state
from chatlearn_trainer_kit.weight_loader import TrainerWeightLoader


@dataclass(slots=True, frozen=True)
class LoadingHooks:
    """What a loader asks of its trainer."""

    model: Callable[[], PreTrainedModel]
    """The live model, its gathered parameters freed; raises where weights cannot be written."""
    taken: Callable[[], None]
    """All weights are new: optimizer and adapters start anew, as after ``load_model``."""
    break_down: Callable[[str], None]
    """The weights are those of no step."""


class ShardedWeightLoader(TrainerWeightLoader):
    """Puts what arrives into this rank's shards, without communication; every rank gets everything.

    No memory is taken beyond one box in the dtype and on the device of the weights, and that for an average only.
    """

    def __init__(self, name: str, layout: CheckpointLayout, decay: float, hooks: LoadingHooks) -> None:
        """Wait for a sync.

        Args:
            name: of role and rank, for messages.
            layout: of the model without adapters; it must satisfy ``takes_tensors``.
            decay: see ``blend``.
            hooks: into the trainer.
        """
        manifest: WeightManifest = layout.manifest()
        super().__init__(name, manifest)
        self._layout = layout
        self._decay = decay
        self._hooks = hooks
        self._held: Mapping[str, HeldRows] = {}
        """Of the open sync: the live rows of each tensor of which this rank has some."""

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
            torch.cuda.synchronize(device)  # the sender uses the memory again

    def _finish(self) -> None:
        self._held = {}
        self._hooks.taken()

    def _fail(self, reason: str) -> None:
        self._held = {}
        self._hooks.break_down(f"taking another trainer's weights failed midway ({reason})")
