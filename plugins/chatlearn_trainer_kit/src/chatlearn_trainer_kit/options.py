"""Options of a trainer's optimizer; a backend's options model inherits from them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class OptimizerOptions(BaseModel):
    """Options of optimizer, learning-rate schedule and clipping under ``roles.<trainer>.options``.

    A backend with its own optimizer (a distributed optimizer, ZeRO) reads the same fields, so that a configuration
    means the same with every trainer.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    optimizer: Literal["adamw", "sgd"] = Field(
        "adamw", description="adamw keeps two moments per parameter; sgd none, or one with momentum."
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum of sgd.")
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Decoupled with adamw, added to the gradient with sgd; never applied to norms and biases.",
    )
    grad_clip: float | None = Field(1.0, gt=0, description="Largest gradient norm; null does not clip.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Decay of the learning rate after the warm-up, over the run's optimizer steps."
    )
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="Final rate of linear and cosine, as a fraction of the peak."
    )
