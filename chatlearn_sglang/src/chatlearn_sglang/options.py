"""Options of the generator ``sglang``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class LoraOptions(BaseModel):
    """LoRA adapters: weight syncs bring an adapter (``weight_sync.payload: adapter``), the base stays as it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_rank: int = Field(16, ge=1, description="Largest rank an adapter may have; SGLang reserves memory for it.")


class SGLangGeneratorOptions(BaseModel):
    """What a configuration may set under ``roles.<generator>.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str | None = Field(
        None, description="Interpreter that holds SGLang; by default this one, if SGLang is installed in it."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of the weights held here; auto: float32 on a CPU, bfloat16 on a GPU."
    )
    lora: LoraOptions | None = Field(None, description="Take adapters instead of whole models; off by default.")
    sync_dtype: Literal["exact", "convert"] = Field(
        "exact", description="Whether a sync may offer another dtype than the one held here; convert casts it."
    )
    bucket_mb: int = Field(
        256, ge=1, description="Shared memory through which tensors of a transport in this process travel, MiB."
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="Environment variables of the engine's processes."
    )
    start_timeout_s: float = Field(1800.0, gt=0, description="Longest time the engine may take to start.")

    @property
    def payloads(self) -> frozenset[str]:
        """What an engine with these options takes: adapters beside a base that stays, or whole models."""
        return frozenset({"full"} if self.lora is None else {"adapter"})
