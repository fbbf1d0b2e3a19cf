"""Options of the trainer ``fsdp``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["float32", "bfloat16"]


class FSDPOptions(BaseModel):
    """``roles.<name>.options`` where ``backend: fsdp``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0, description="Decoupled (AdamW); never on norms and biases.")
    grad_clip: float | None = Field(1.0, gt=0, description="Largest gradient norm; null does not clip.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the learning rate falls after the warm-up, over the run's optimizer steps."
    )
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Where linear and cosine end, as a share of the peak.")

    max_tokens_per_micro_batch: int = Field(
        8192, ge=1, description="Token budget of one forward pass; a longer sequence or unit gets a pass of its own."
    )
    logits_chunk_tokens: int | None = Field(
        None, ge=1, description="Tokens whose logits are held at once; null keeps them under 128 MiB in float32."
    )
    param_dtype: Dtype = Field("float32", description="What forward and backward compute in.")
    master_dtype: Dtype = Field("float32", description="What the optimizer holds.")
    attention: Literal["varlen", "sdpa", "eager"] = Field(
        "varlen", description="varlen computes nothing across packed sequences; the others build a [T, T] mask."
    )
    gradient_checkpointing: bool = Field(False, description="Recompute each layer in the backward pass.")
    cpu_offload: bool = Field(False, description="Keep sharded weights, gradients and optimizer state in host memory.")
    num_threads: int | None = Field(None, ge=1, description="torch's intra-op threads; null leaves torch's choice.")

    @model_validator(mode="after")
    def _dtypes_agree(self) -> FSDPOptions:
        if self.param_dtype == "float32" and self.master_dtype == "bfloat16":
            raise ValueError(
                "param_dtype float32 with master_dtype bfloat16 would compute in a precision that the weights do not"
                " have; set master_dtype: float32, or both to bfloat16"
            )
        return self
