"""Options of the sampler ``shuffled``, apart from ``data``, which imports torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ShuffledOptions(BaseModel):
    """None: datasets have weights of their own, and ``data.shuffle`` says whether order is drawn."""

    model_config = ConfigDict(extra="forbid", frozen=True)
