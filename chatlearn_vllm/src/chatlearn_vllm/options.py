"""Options of the generator ``vllm``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from chatlearn_generator_kit.sync_dtype import SYNC_DTYPE_HELP, SyncDtype


class LoraOptions(BaseModel):
    """LoRA: weight syncs load an adapter (``weight_sync.payload: adapter``), the base weights stay fixed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_rank: int = Field(16, ge=1, description="Largest adapter rank; vLLM reserves memory for it.")


class VLLMGeneratorOptions(BaseModel):
    """Options under ``roles.<generator>.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: Literal["process", "child"] = Field(
        "process", description="process: the engine runs in the worker's process; child: in its own process."
    )
    python: str | None = Field(
        None, description="Another interpreter that has vLLM installed; the engine then runs in a child process."
    )
    runner: Literal["generate", "classify"] = Field(
        "generate",
        description="generate: sample completions; classify: serve a sequence classifier with one label, whose scores "
        "the reward model uses.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Dtype of the engine's weights; auto: float32 on a CPU, bfloat16 on a GPU."
    )
    logprobs: Literal["processed", "raw"] = Field(
        "processed",
        description="Distribution of the logprobs. processed: the one sampled from; raw: the model's unmodified one.",
    )
    lora: LoraOptions | None = Field(None, description="Sync LoRA adapters instead of whole models; off by default.")
    sleep_level: Literal[1, 2] = Field(
        1, description="How to offload weights: 1 keeps them in host memory; 2 drops them until the next sync."
    )
    sync_dtype: SyncDtype = Field("auto", description=SYNC_DTYPE_HELP)
    bucket_mb: int = Field(
        256, ge=1, description="Size in MiB of the shared memory that carries tensors to an engine in another process."
    )
    num_threads: int | None = Field(
        None, ge=1, le=1024, description="Number of torch CPU threads in the engine's process; unchanged by default."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "error",
        description="Lowest level of vLLM log messages to forward; error texts quote its last lines in any case.",
    )
    start_timeout_s: float = Field(
        1800.0, gt=0, description="Longest time in seconds that the engine may take to start."
    )

    @property
    def classifies(self) -> bool:
        """Whether the engine serves a sequence classifier, and samples nothing."""
        return self.runner == "classify"

    @property
    def bases(self) -> frozenset[str]:
        """Logprob bases that the engine returns."""
        return frozenset({self.logprobs})

    @property
    def kept_ids(self) -> bool:
        """Whether the engine returns the ids that it sampled from: those with a processed logprob."""
        return self.logprobs == "processed"

    @model_validator(mode="after")
    def _adapters_need_their_base(self) -> VLLMGeneratorOptions:
        if self.lora is not None and self.sleep_level == 2:
            raise ValueError(
                "sleep_level 2 drops the base weights, which adapter syncs cannot restore; set sleep_level: 1"
            )
        return self

    @model_validator(mode="after")
    def _classifiers_are_fixed(self) -> VLLMGeneratorOptions:
        if self.lora is not None and self.classifies:
            raise ValueError("lora is for weight syncs, and a classifier's weights are fixed; remove lora")
        return self

    @property
    def payloads(self) -> frozenset[str]:
        """Payloads that an engine with these options accepts: adapters for a fixed base, or whole models."""
        return frozenset({"full"} if self.lora is None else {"adapter"})
