"""Options of the model family ``transformers``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class TransformersFamilyOptions(BaseModel):
    """No options: a model directory fully describes itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)
