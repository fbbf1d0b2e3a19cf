"""Options of the trainer ``fsdp``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from chatlearn_trainer_kit.options import OptimizerOptions

Dtype = Literal["float32", "bfloat16"]


class LoraOptions(BaseModel):
    """``options.lora``: train low-rank adapters on frozen weights [2106.09685]. Needs ``chatlearn-fsdp[lora]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0, description="Adapters are scaled by alpha / rank.")
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Dropout on the input of adapters in training; importance ratios of an on-policy update are then"
        " not 1.",
    )
    target_modules: tuple[str, ...] | Literal["all-linear"] = Field(
        "all-linear",
        description="Endings of module names; all-linear selects every plain linear layer except the heads.",
    )


class FSDPOptions(OptimizerOptions):
    """Options ``roles.<name>.options`` for ``backend: fsdp``."""

    max_tokens_per_micro_batch: int = Field(
        8192, ge=1, description="Token budget of one forward pass; a longer sequence or unit gets its own pass."
    )
    share_prompts: bool = Field(
        True,
        description="Compute the common prompt tokens of a group's sequences once in each micro-batch, with the same"
        " gradients. They then count once in the token budget, plus an eighth for each repetition. Needs attention"
        " varlen, packed sequences and ulysses 1; otherwise prompts are computed separately.",
    )
    logits_chunk_tokens: int | None = Field(
        None, ge=1, description="Tokens whose logits are held at once; null keeps them under 128 MiB in float32."
    )
    param_dtype: Dtype = Field("float32", description="Dtype of forward and backward passes.")
    master_dtype: Dtype = Field("float32", description="Dtype of the weights that the optimizer updates.")
    attention: Literal["varlen", "sdpa", "eager"] = Field(
        "varlen",
        description="varlen computes nothing across packed sequences; the others build a [T, T] mask. The trainer"
        " compares each with the model's own forward passes at the start; see docs/models.md.",
    )
    sequences: Literal["auto", "packed", "padded"] = Field(
        "auto",
        description="packed concatenates sequences in one row; padded gives each its own row (attention varlen then"
        " becomes sdpa or eager); auto packs where that is correct for the model, and otherwise pads, with a warning.",
    )
    dropout: bool = Field(
        False,
        description="Train with the dropout and router noise in the model's config.json. Off by default, so that an"
        " update computes the same logprobs as before it.",
    )
    gradient_checkpointing: bool = Field(False, description="Recompute each layer in the backward pass.")
    cpu_offload: bool = Field(False, description="Keep sharded weights, gradients and optimizer state in host memory.")
    dp_replicate: int = Field(
        1, ge=1, description="Copies of the sharded model (HSDP): ranks = dp_replicate x dp_shard x ulysses."
    )
    dp_shard: int | None = Field(None, ge=1, description="Batch slices per copy; null takes all remaining ranks.")
    ulysses: int = Field(
        1, ge=1, description="Ranks that share the tokens of each packed row (sequence parallelism by heads)."
    )
    experts: Literal["auto", "grouped_mm", "eager"] = Field(
        "auto", description="Mixtures: one grouped matmul, or a loop over experts; auto groups where torch supports it."
    )
    lora: LoraOptions | None = Field(None, description="Adapters to train; null trains the weights.")
    num_threads: int | None = Field(
        None, ge=1, le=1024, description="Number of torch intra-op threads; null keeps torch's default."
    )

    @property
    def weights_on_device(self) -> bool:
        """Whether what it streams is on the role's device, and not in host memory."""
        return not self.cpu_offload

    @property
    def payloads(self) -> frozenset[str]:
        """Payloads that a trainer with these options can send: adapters only if it trains some."""
        return frozenset({"full", "adapter"} if self.lora is not None else {"full"})

    @model_validator(mode="after")
    def _ulysses_has_its_attention(self) -> FSDPOptions:
        if self.ulysses > 1 and self.attention != "varlen":
            raise ValueError(
                f"ulysses {self.ulysses} exchanges heads inside attention 'varlen', and attention is"
                f" {self.attention!r}; set attention: varlen, or ulysses: 1"
            )
        if self.ulysses > 1 and self.sequences == "padded":
            raise ValueError(
                f"ulysses {self.ulysses} splits the tokens of packed rows, but sequences is 'padded'; set sequences:"
                " auto, or ulysses: 1"
            )
        return self

    @model_validator(mode="after")
    def _ranks_are_divided(self, info: ValidationInfo) -> FSDPOptions:
        ranks = (info.context or {}).get("ranks")
        if ranks is not None:
            self.mesh_sizes(ranks)
        return self

    def mesh_sizes(self, ranks: int) -> tuple[int, int, int]:
        """Return ``dp_replicate``, ``dp_shard`` and ``ulysses`` with null filled in.

        Raises:
            ValueError: their product is not the number of ranks.
        """
        fixed = self.dp_replicate * self.ulysses
        shard = self.dp_shard if self.dp_shard is not None else max(1, ranks // fixed)
        if fixed * shard != ranks:
            raise ValueError(
                f"dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard or 'null'} x ulysses {self.ulysses} is"
                f" {fixed * shard}, but the role has ranks: {ranks}; the product must be the number of ranks"
            )
        return self.dp_replicate, shard, self.ulysses

    @model_validator(mode="after")
    def _dtypes_agree(self) -> FSDPOptions:
        if self.param_dtype == "float32" and self.master_dtype == "bfloat16":
            raise ValueError(
                "param_dtype float32 with master_dtype bfloat16 would compute in a higher precision than the weights"
                " have; set master_dtype: float32, or both to bfloat16"
            )
        return self
