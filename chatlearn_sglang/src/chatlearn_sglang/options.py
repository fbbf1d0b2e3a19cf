"""Options of the generator ``sglang``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from chatlearn_generator_kit.sync_dtype import SYNC_DTYPE_HELP, SyncDtype


class LoraOptions(BaseModel):
    """LoRA: weight syncs load an adapter (``weight_sync.payload: adapter``), the base weights stay fixed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_rank: int = Field(16, ge=1, description="Largest adapter rank; SGLang reserves memory for it.")


class SGLangGeneratorOptions(BaseModel):
    """Options under ``roles.<generator>.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str | None = Field(
        None, description="Interpreter with SGLang; by default this one, if SGLang is installed in it."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Dtype of the engine's weights; auto: float32 on a CPU, bfloat16 on a GPU."
    )
    lora: LoraOptions | None = Field(None, description="Sync LoRA adapters instead of whole models; off by default.")
    sync_dtype: SyncDtype = Field("auto", description=SYNC_DTYPE_HELP)
    bucket_mb: int = Field(
        256,
        ge=1,
        description="Size in MiB of the shared memory that carries tensors from a transport in this process.",
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="Environment variables of the engine's processes."
    )
    start_timeout_s: float = Field(1800.0, gt=0, description="Longest time in seconds until the engine has started.")

    @property
    def payloads(self) -> frozenset[str]:
        """Payloads that an engine with these options accepts: adapters for a fixed base, or whole models."""
        return frozenset({"full"} if self.lora is None else {"adapter"})
