"""Options of the trainer ``fsdp``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, model_validator

from chatlearn_trainer_kit.options import PackedTrainerOptions

Dtype = Literal["float32", "bfloat16"]


class FSDPOptions(PackedTrainerOptions):
    """Options ``roles.<name>.options`` for ``backend: fsdp``."""

    param_dtype: Dtype = Field("float32", description="Dtype of forward and backward passes.")
    master_dtype: Dtype = Field("float32", description="Dtype of the weights that the optimizer updates.")
    cpu_offload: bool = Field(False, description="Keep sharded weights, gradients and optimizer state in host memory.")
    dp_replicate: int = Field(
        1,
        ge=1,
        description="Copies of the sharded model (HSDP): ranks = dp_replicate x dp_shard x ulysses x ring x"
        " tensor_parallel.",
    )
    dp_shard: int | None = Field(None, ge=1, description="Batch slices per copy; null takes all remaining ranks.")
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="Ranks that hold parts of each layer's matrices and compute parts of its heads and MLP, on the same"
        " sequences (Llama, Mistral, Qwen2 and Qwen3). Each of them computes embedding and head whole.",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        3,
        description="What ranks shard during a step: 3 weights, gradients and optimizer state; 2 gathers weights once a"
        " step; 1 also reduces gradients once a step; 0 shards nothing (DDP).",
    )

    @property
    def weights_on_device(self) -> bool:
        """Whether what it streams is on the role's device, and not in host memory."""
        return not self.cpu_offload

    @property
    def ranks_per_slice(self) -> int:
        """Number of consecutive ranks that work on the same batch slice."""
        return self.ranks_per_row * self.tensor_parallel

    @property
    def gathers_once(self) -> bool:
        """Whether weights stay gathered from their first use in a step to their last."""
        return self.zero_stage < 3

    @property
    def reduces_once(self) -> bool:
        """Whether each rank adds up whole gradients of a step's micro-batches before ranks reduce them."""
        return self.zero_stage < 2

    @model_validator(mode="after")
    def _ranks_are_divided(self, info: ValidationInfo) -> FSDPOptions:
        ranks = (info.context or {}).get("ranks")
        if ranks is not None:
            self.mesh_sizes(ranks)
        return self

    def mesh_sizes(self, ranks: int) -> tuple[int, int, int]:
        """Return ``dp_replicate`` and ``dp_shard`` with null filled in, and the ranks that share each slice.

        Raises:
            ValueError: their product is not the number of ranks.
        """
        replicate = self.dp_replicate
        if self.zero_stage == 0 and replicate == 1:
            replicate = max(1, ranks // self.ranks_per_slice)
        fixed = replicate * self.ranks_per_slice
        shard = 1 if self.zero_stage == 0 else self.dp_shard if self.dp_shard is not None else max(1, ranks // fixed)
        if fixed * shard != ranks:
            sharing = "tensor_parallel" if self.tensor_parallel > 1 else "ring" if self.ring > 1 else "ulysses"
            raise ValueError(
                f"dp_replicate {replicate} x dp_shard {self.dp_shard or 'null'} x"
                f" {sharing} {self.ranks_per_slice} is {fixed * shard},"
                f" but the role has ranks: {ranks}; the product must be the number of ranks"
            )
        return replicate, shard, self.ranks_per_slice

    @model_validator(mode="after")
    def _layers_are_split_in_one_way(self) -> FSDPOptions:
        tensor = self.tensor_parallel
        if tensor > 1 and self.ranks_per_row > 1:
            name = "ring" if self.ring > 1 else "ulysses"
            raise ValueError(
                f"tensor_parallel {tensor} splits layers by heads and {name} {self.ranks_per_row} splits rows by"
                " tokens; set one of them to 1"
            )
        if tensor > 1 and self.lora is not None:
            raise ValueError(
                f"tensor_parallel {tensor} splits the weights of linear layers, which lora keeps whole beside its"
                " adapters; set tensor_parallel: 1, or lora: null"
            )
        return self

    @model_validator(mode="after")
    def _stage_shards_what_is_asked(self) -> FSDPOptions:
        if self.zero_stage == 0 and self.dp_shard not in (None, 1):
            raise ValueError(
                f"zero_stage 0 shards nothing, but dp_shard is {self.dp_shard}; set zero_stage to 1, 2 or 3, or leave"
                " dp_shard out"
            )
        if self.cpu_offload and self.zero_stage < 3:
            raise ValueError(
                f"cpu_offload keeps weights in host memory, but zero_stage {self.zero_stage} keeps whole weights on the"
                " device during a step; set zero_stage: 3, or cpu_offload: false"
            )
        return self

    @model_validator(mode="after")
    def _dtypes_agree(self) -> FSDPOptions:
        if self.param_dtype == "float32" and self.master_dtype == "bfloat16":
            raise ValueError(
                "param_dtype float32 with master_dtype bfloat16 would compute in a higher precision than the weights"
                " have; set master_dtype: float32, or both to bfloat16"
            )
        return self
