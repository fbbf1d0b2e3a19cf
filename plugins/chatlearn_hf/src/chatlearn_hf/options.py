"""Options of the model family ``transformers``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class TransformersFamilyOptions(BaseModel):
    """There are none: a model directory says everything about itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)
