"""Options of a trainer's optimizer and of its model's forward passes; a backend's options model inherits from them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


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


class LoraOptions(BaseModel):
    """``options.lora``: train low-rank adapters on frozen weights [2106.09685]. Needs the trainer's extra ``lora``."""

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


class AdapterTrainerOptions(OptimizerOptions):
    """Options of trainers that train a model's weights or adapters on them."""

    lora: LoraOptions | None = Field(None, description="Adapters to train; null trains the weights.")

    @property
    def payloads(self) -> frozenset[str]:
        """Payloads that a trainer with these options can send: adapters only if it trains some."""
        return frozenset({"full", "adapter"} if self.lora is not None else {"full"})


class PackedTrainerOptions(AdapterTrainerOptions):
    """Options that trainers of transformers models share: packing, attention, sequence parallelism."""

    max_tokens_per_micro_batch: int = Field(
        8192, ge=1, description="Token budget of one forward pass; a longer sequence or unit gets its own pass."
    )
    share_prompts: bool = Field(
        True,
        description="Compute the common prompt tokens of a group's sequences once in each micro-batch, with the same"
        " gradients. They then count once in the token budget, plus an eighth for each repetition. Needs attention"
        " varlen, packed sequences, ulysses 1 and ring 1; otherwise prompts are computed separately.",
    )
    logits_chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens whose logits are held at once; null keeps them under 128 MiB in float32, 512 on a GPU.",
    )
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
    ulysses: int = Field(
        1, ge=1, description="Ranks that share the tokens of each packed row (sequence parallelism by heads)."
    )
    ring: int = Field(
        1,
        ge=1,
        description="Ranks that share the tokens of each packed row and pass keys and values on (ring attention): for"
        " more ranks than ulysses can have.",
    )
    experts: Literal["auto", "grouped_mm", "eager"] = Field(
        "auto", description="Mixtures: one grouped matmul, or a loop over experts; auto groups where torch supports it."
    )
    num_threads: int | None = Field(
        None, ge=1, le=1024, description="Number of torch intra-op threads; null keeps torch's default."
    )

    @property
    def ranks_per_row(self) -> int:
        """Number of ranks that share the tokens of a packed row."""
        return self.ulysses * self.ring

    @property
    def ranks_per_slice(self) -> int:
        """Number of consecutive ranks that work on the same batch slice."""
        return self.ranks_per_row

    @model_validator(mode="after")
    def _shared_rows_have_their_attention(self) -> PackedTrainerOptions:
        if self.ulysses > 1 and self.ring > 1:
            raise ValueError(
                f"ulysses {self.ulysses} and ring {self.ring} both divide the tokens of a row; set one of them to 1"
            )
        name = "ring" if self.ring > 1 else "ulysses"
        if self.ranks_per_row > 1 and self.attention != "varlen":
            raise ValueError(
                f"{name} {self.ranks_per_row} works inside attention 'varlen', and attention is"
                f" {self.attention!r}; set attention: varlen, or {name}: 1"
            )
        if self.ranks_per_row > 1 and self.sequences == "padded":
            raise ValueError(
                f"{name} {self.ranks_per_row} splits the tokens of packed rows, but sequences is 'padded'; set"
                f" sequences: auto, or {name}: 1"
            )
        return self
