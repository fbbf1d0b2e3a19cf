"""Options of the trainer ``megatron``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, model_validator

from chatlearn_trainer_kit.options import AdapterTrainerOptions


class MegatronOptions(AdapterTrainerOptions):
    """Options ``roles.<name>.options`` for ``backend: megatron``.

    Ranks are ordered as Megatron orders them: tensor, context and data parallel ranks vary in this order, the first
    fastest, and pipeline stages vary slowest. Expert parallel ranks lie within the context and data parallel ones.
    """

    tensor_parallel: int = Field(1, ge=1, description="Ranks that share each matrix; divides the heads.")
    pipeline_parallel: int = Field(1, ge=1, description="Stages, each with its part of the layers.")
    virtual_pipeline: int = Field(
        1,
        ge=1,
        description="Chunks of layers that each stage holds (interleaved schedule); needs pipeline_parallel above 1.",
    )
    context_parallel: int = Field(
        1,
        ge=1,
        description="Ranks that share the tokens of each packed row, and its attention by heads (all-to-all).",
    )
    expert_parallel: int = Field(1, ge=1, description="Ranks over which the experts of a mixture are spread.")
    expert_tensor_parallel: int | None = Field(
        None, ge=1, description="Ranks that share each expert's matrices; null means tensor_parallel."
    )
    sequence_parallel: bool = Field(
        False, description="Also split what tensor_parallel ranks would compute twice (norms) by tokens."
    )
    distributed_optimizer: bool = Field(
        True, description="Shard the state of adamw over data parallel ranks; of no effect with sgd."
    )
    overlap: bool = Field(False, description="Reduce gradients and gather weights while computing.")
    gradient_checkpointing: bool = Field(False, description="Recompute each layer in the backward pass.")
    max_tokens_per_micro_batch: int = Field(
        8192, ge=1, description="Token budget of one forward pass; a longer sequence or unit gets its own pass."
    )
    logits_chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens whose logits are held at once; null keeps them under 128 MiB in float32, 512 on a GPU.",
    )
    param_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Dtype of forward and backward passes; the optimizer updates float32 weights in either case.",
    )
    transformer_engine: bool | None = Field(
        None,
        description=(
            "Run TransformerEngine's layers; null: on GPUs where it is installed, but for float32, adapters and latent"
            " attention."
        ),
    )
    num_threads: int | None = Field(
        None, ge=1, le=1024, description="Number of torch intra-op threads; null keeps torch's default."
    )

    @property
    def model_parallel(self) -> int:
        """Number of ranks that share a slice of a batch."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def shards_optimizer(self) -> bool:
        """Whether optimizer state is sharded; Megatron-Core shards that of adamw only."""
        return self.distributed_optimizer and self.optimizer == "adamw"

    @property
    def gathers_late(self) -> bool:
        """Whether a step leaves the weights of other ranks' shards to be gathered during the next forward pass."""
        return self.overlap and self.shards_optimizer

    @property
    def expert_tensor(self) -> int:
        """``expert_tensor_parallel`` with null filled in."""
        return self.expert_tensor_parallel or self.tensor_parallel

    @model_validator(mode="after")
    def _combination_exists(self) -> MegatronOptions:
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ValueError(
                f"virtual_pipeline {self.virtual_pipeline} interleaves the chunks of several stages, but"
                " pipeline_parallel is 1; set pipeline_parallel above 1, or virtual_pipeline: 1"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "sequence_parallel splits what tensor parallel ranks would compute twice, but tensor_parallel is 1;"
                " set tensor_parallel above 1, or sequence_parallel: false"
            )
        if self.tensor_parallel % self.expert_tensor:
            raise ValueError(
                f"expert_tensor_parallel {self.expert_tensor} does not divide tensor_parallel {self.tensor_parallel};"
                " with experts over more ranks than the other matrices Megatron-Core reports a wrong gradient norm"
            )
        if self.expert_parallel > 1 and self.tensor_parallel > 1 and not self.sequence_parallel:
            raise ValueError(
                f"expert_parallel {self.expert_parallel} with tensor_parallel {self.tensor_parallel} needs"
                " sequence_parallel: true, because Megatron-Core dispatches each token once"
            )
        if self.lora is not None and self.transformer_engine:
            raise ValueError(
                "transformer_engine: true with lora: adapters run on Megatron-Core's own layers; set"
                " transformer_engine: null, or remove lora"
            )
        if self.lora is not None and self.lora.dropout:
            raise ValueError(
                f"lora.dropout is {self.lora.dropout:g}, but the trainer 'megatron' computes without dropout; set"
                " lora.dropout: 0, or use backend: fsdp"
            )
        return self

    @model_validator(mode="after")
    def _ranks_are_divided(self, info: ValidationInfo) -> MegatronOptions:
        ranks = (info.context or {}).get("ranks")
        if ranks is not None:
            self.data_parallel(ranks)
        return self

    def data_parallel(self, ranks: int) -> int:
        """Return the number of batch slices.

        Raises:
            ValueError: a product of the sizes does not divide the number of ranks; names the nearest that do.
        """
        if ranks % self.model_parallel:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} x pipeline_parallel {self.pipeline_parallel} x"
                f" context_parallel {self.context_parallel} is {self.model_parallel}, which does not divide the role's"
                f" ranks: {ranks}; set ranks to a multiple, such as {_nearest_multiple(ranks, self.model_parallel)}"
            )
        experts = self.expert_tensor * self.expert_parallel * self.pipeline_parallel
        if ranks % experts:
            raise ValueError(
                f"expert_tensor_parallel {self.expert_tensor} x expert_parallel {self.expert_parallel} x"
                f" pipeline_parallel {self.pipeline_parallel} is {experts}, which does not divide the role's ranks:"
                f" {ranks}; set ranks to a multiple, such as {_nearest_multiple(ranks, experts)}"
            )
        return ranks // self.model_parallel


def _nearest_multiple(number: int, of: int) -> int:
    return max(of, round(number / of) * of)
