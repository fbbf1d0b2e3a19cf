"""Receives another trainer's weights: each rank copies the parts that its parameters hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from chatlearn_core.types import WeightShard
from chatlearn_core.types.boxes import overlap
from chatlearn_megatron.model import MegatronModel
from chatlearn_megatron.pieces import Piece
from chatlearn_megatron.weights import manifest_of
from chatlearn_trainer_kit.weight_loader import TrainerWeightLoader


@dataclass(slots=True, frozen=True)
class LoadingHooks:
    """Functions of the trainer that a loader calls."""

    model: Callable[[], MegatronModel]
    """Returns the live model; raises if its weights cannot be written now."""
    taken: Callable[[], None]
    """Called when all weights have arrived: resets the optimizer, as ``load_model`` does."""
    break_down: Callable[[str], None]
    """Called with a reason when loading failed midway: the weights may match no completed step."""


class PieceLoader(TrainerWeightLoader):
    """Copies arriving tensors into this rank's parameters, without communication; every rank receives all tensors."""

    def __init__(self, name: str, model: MegatronModel, decay: float, hooks: LoadingHooks) -> None:
        """Create the loader; it accepts a sync at any time.

        Args:
            name: role and rank, for messages.
            model: for names and shapes.
            decay: fraction of each weight that is kept.
            hooks: functions of the trainer.
        """
        super().__init__(name, manifest_of(model))
        self._decay = decay
        self._hooks = hooks
        self._held: dict[str, list[Piece]] = {}
        """In the open sync: this rank's pieces by checkpoint name."""

    def _begin(self) -> None:
        self._held = {}
        for piece in self._hooks.model().pieces():
            self._held.setdefault(piece.name, []).append(piece)

    def _place(self, shard: WeightShard) -> None:
        with torch.no_grad():
            for piece in self._held.get(shard.name, ()):
                shared = overlap(shard.box, piece.box)
                if shared is None:
                    continue
                source = shard.tensor[_within(shared, shard.box)]
                if shared == piece.box:
                    piece.copy_(source, self._decay)
                    continue
                whole = piece.tensor().clone()
                part = whole[_within(shared, piece.box)]
                if self._decay:
                    part.mul_(self._decay).add_(source.to(part.device, part.dtype), alpha=1 - self._decay)
                else:
                    part.copy_(source)
                piece.copy_(whole)

    def _loaded(self) -> None:
        devices = {piece.view.device for pieces in self._held.values() for piece in pieces if piece.view.is_cuda}
        for device in devices:
            torch.cuda.synchronize(device)  # the sender reuses the memory

    def _finish(self) -> None:
        self._held = {}
        self._hooks.taken()

    def _fail(self, reason: str) -> None:
        self._held = {}
        self._hooks.break_down(f"loading another trainer's weights failed midway ({reason})")


def _within(box: tuple[tuple[int, int], ...], outer: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    """Return the slices of ``box`` inside a tensor that holds ``outer``."""
    return tuple(slice(first - start, last - start) for (first, last), (start, _) in zip(box, outer, strict=True))
