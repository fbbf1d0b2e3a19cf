"""Options of the generator ``transformers``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TransformersGeneratorOptions(BaseModel):
    """What a configuration may set under ``roles.<generator>.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of the weights held here; auto: float32 on a CPU, bfloat16 on a GPU."
    )
    attention: Literal["sdpa", "eager"] = Field(
        "sdpa",
        description="sdpa: torch's fused attention without repeating grouped KV heads; eager: transformers' own loops.",
    )
    max_num_sequences: int = Field(
        256, ge=1, description="Sequences decoded together; more wait in the order of their submission."
    )
    max_prefill_tokens: int = Field(
        8192, ge=1, description="Prompt tokens computed in one step; a longer prompt is computed alone."
    )
    max_kv_cache_gb: float | None = Field(
        None,
        gt=0,
        description="Admit no sequence whose worst case needs a larger KV cache, GiB; unbounded by default.",
    )
    share_prefixes: bool = Field(True, description="Compute equal prompts that start together once.")
    kv_after_sync: Literal["recomputed", "kept"] = Field(
        "recomputed",
        description="Unfinished sequences at a weight sync: compute their KV cache again, or go on with the old one.",
    )
    sync_dtype: Literal["exact", "convert"] = Field(
        "exact", description="Whether a sync may offer another dtype than the one held here; convert casts it."
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="torch's CPU threads while generating, for the whole process; left alone by default.",
    )
