"""Options of the sampler ``shuffled``, outside ``data`` because that package imports torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ShuffledOptions(BaseModel):
    """No options: datasets have their own weights, and ``data.shuffle`` turns shuffling on."""

    model_config = ConfigDict(extra="forbid", frozen=True)
