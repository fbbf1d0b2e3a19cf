"""Options of the generator ``vllm``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class LoraOptions(BaseModel):
    """LoRA adapters: weight syncs bring an adapter (``weight_sync.payload: adapter``), the base stays as it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_rank: int = Field(16, ge=1, description="Largest rank an adapter may have; vLLM reserves memory for it.")


class VLLMGeneratorOptions(BaseModel):
    """What a configuration may set under ``roles.<generator>.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: Literal["process", "child"] = Field(
        "process", description="process: the engine runs in the worker's own process; child: in a process of its own."
    )
    python: str | None = Field(
        None, description="Interpreter that holds vLLM, where it is another one; the engine then runs in a child."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of the weights held here; auto: float32 on a CPU, bfloat16 on a GPU."
    )
    logprobs: Literal["processed", "raw"] = Field(
        "processed", description="processed: of the distribution sampled from; raw: of the model's own."
    )
    lora: LoraOptions | None = Field(None, description="Take adapters instead of whole models; off by default.")
    sleep_level: Literal[1, 2] = Field(
        1, description="What offloading weights does: 1 keeps them in host memory; 2 drops them until the next sync."
    )
    sync_dtype: Literal["exact", "convert"] = Field(
        "exact", description="Whether a sync may offer another dtype than the one held here; convert casts it."
    )
    bucket_mb: int = Field(
        256, ge=1, description="Shared memory through which tensors reach an engine in another process, MiB."
    )
    num_threads: int | None = Field(
        None, ge=1, le=1024, description="torch's CPU threads in the engine's process; left alone by default."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "error", description="What of vLLM's own log is passed on; errors of ours quote its last lines anyway."
    )
    start_timeout_s: float = Field(1800.0, gt=0, description="Longest time the engine may take to start.")

    @property
    def bases(self) -> frozenset[str]:
        """Of which distribution the logprobs are."""
        return frozenset({self.logprobs})

    @model_validator(mode="after")
    def _adapters_need_their_base(self) -> VLLMGeneratorOptions:
        if self.lora is not None and self.sleep_level == 2:
            raise ValueError(
                "sleep_level 2 drops the base weights, which syncs of adapters never bring back; set sleep_level: 1"
            )
        return self

    @property
    def payloads(self) -> frozenset[str]:
        """What an engine with these options takes: adapters beside a base that stays, or whole models."""
        return frozenset({"full"} if self.lora is None else {"adapter"})
