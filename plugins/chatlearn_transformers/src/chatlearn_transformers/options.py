"""Options of the generator ``transformers``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from chatlearn_generator_kit.sync_dtype import SYNC_DTYPE_HELP, SyncDtype


class TransformersGeneratorOptions(BaseModel):
    """Options under ``roles.<generator>.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Dtype of the model's weights; auto: float32 on a CPU, bfloat16 on a GPU."
    )
    attention: Literal["sdpa", "eager"] = Field(
        "sdpa",
        description="sdpa: torch's fused attention without repeating grouped KV heads; eager: the model's own code.",
    )
    max_num_sequences: int = Field(
        256, ge=1, description="Sequences decoded together; further ones wait in submission order."
    )
    max_prefill_tokens: int = Field(
        8192, ge=1, description="Prompt tokens computed in one step; a longer prompt gets its own step."
    )
    max_kv_cache_gb: float | None = Field(
        None,
        gt=0,
        description="Largest KV cache in GiB that admitted sequences may need at full length; unbounded by default.",
    )
    share_prefixes: bool = Field(True, description="Compute equal prompts that start together once.")
    kv_after_sync: Literal["recomputed", "kept"] = Field(
        "recomputed",
        description="Whether unfinished sequences recompute or keep their KV cache after a weight sync.",
    )
    sync_dtype: SyncDtype = Field("auto", description=SYNC_DTYPE_HELP)
    num_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Number of torch CPU threads in generation, for the whole process; unchanged by default.",
    )
