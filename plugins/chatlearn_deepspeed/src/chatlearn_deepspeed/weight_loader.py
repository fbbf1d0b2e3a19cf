"""Receives another trainer's weights: each rank keeps the elements that it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from chatlearn_core.types import WeightShard
from chatlearn_deepspeed.fragments import Fragment, write_whole
from chatlearn_hf.checkpoint_names import CheckpointLayout, StateTensor
from chatlearn_trainer_kit.weight_loader import TrainerWeightLoader


@dataclass(slots=True, frozen=True)
class LoadingHooks:
    """Functions of the trainer that a loader calls."""

    fragments: Callable[[], Mapping[str, Fragment]]
    """Returns what this rank holds, by state name without adapters; raises if weights cannot be written now."""
    taken: Callable[[], None]
    """Called when all weights have arrived: resets optimizer and adapters, as ``load_model`` does."""
    break_down: Callable[[str], None]
    """Called with a reason when loading failed midway: the weights may match no completed step."""


@dataclass(slots=True)
class _Arriving:
    """A state tensor of which a part has arrived."""

    entry: StateTensor
    whole: Tensor
    missing: int
    """Number of elements that have not arrived."""


class FragmentWeightLoader(TrainerWeightLoader):
    """Assembles each state tensor from what arrives and copies this rank's elements of it, without communication.

    Every rank receives all tensors. Holds the state tensors of which a part is missing: one, if they arrive in order.
    """

    def __init__(self, name: str, layout: CheckpointLayout, decay: float, hooks: LoadingHooks) -> None:
        """Create the loader; it accepts a sync at any time.

        Args:
            name: role and rank, for messages.
            layout: layout of the model without adapters; it must satisfy ``takes_tensors``.
            decay: see ``blend``.
            hooks: functions of the trainer.
        """
        super().__init__(name, layout.manifest())
        self._decay = decay
        self._hooks = hooks
        self._place_of = {name: (entry, number) for entry in layout.tensors for number, name in enumerate(entry.names)}
        self._fragments: Mapping[str, Fragment] = {}
        self._arriving: dict[str, _Arriving] = {}

    def _begin(self) -> None:
        self._fragments = self._hooks.fragments()
        self._arriving = {}

    def _place(self, shard: WeightShard) -> None:
        entry, number = self._place_of[shard.name]
        if shard.global_shape == entry.shape == tuple(shard.tensor.shape) and len(entry.names) == 1:
            write_whole(self._fragments[entry.key], shard.tensor, self._decay)
            return
        arriving = self._arriving.get(entry.key)
        if arriving is None:
            whole = torch.empty(entry.shape, dtype=shard.tensor.dtype, device=shard.tensor.device)
            arriving = self._arriving[entry.key] = _Arriving(entry, whole, whole.numel())
        assert entry.parts is not None, "takes_tensors"
        part = entry.parts[number].view(arriving.whole).view(entry.shapes[number])
        part[tuple(slice(*side) for side in shard.box)].copy_(shard.tensor)
        arriving.missing -= shard.tensor.numel()
        if not arriving.missing:
            write_whole(self._fragments[entry.key], arriving.whole, self._decay)
            del self._arriving[entry.key]

    def _loaded(self) -> None:
        for device in {fragment.values.device for fragment in self._fragments.values() if fragment.values.is_cuda}:
            torch.cuda.synchronize(device)  # the sender reuses the memory

    def _finish(self) -> None:
        self._fragments = {}
        self._hooks.taken()

    def _fail(self, reason: str) -> None:
        self._fragments, self._arriving = {}, {}
        self._hooks.break_down(f"loading another trainer's weights failed midway ({reason})")
