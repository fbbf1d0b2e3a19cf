"""Settings with which the conformance suite tests this package; a run never imports this module."""

from __future__ import annotations

from typing import Any

import torch
from chatlearn_core.types import OutputRequest, TrainBatch

from acme_plugin.output import margins


def compute(batch: TrainBatch, request: OutputRequest, logits: torch.Tensor) -> torch.Tensor:
    """The values as a trainer returns them."""
    return margins(logits, batch.loss_mask, request.temperature)


SETTINGS: dict[str, dict[str, Any]] = {"output/acme": {"compute": compute}}
