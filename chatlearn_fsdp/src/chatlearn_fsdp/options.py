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
        1, ge=1, description="Copies of the sharded model (HSDP): ranks = dp_replicate x dp_shard x ulysses."
    )
    dp_shard: int | None = Field(None, ge=1, description="Batch slices per copy; null takes all remaining ranks.")

    @property
    def weights_on_device(self) -> bool:
        """Whether what it streams is on the role's device, and not in host memory."""
        return not self.cpu_offload

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
