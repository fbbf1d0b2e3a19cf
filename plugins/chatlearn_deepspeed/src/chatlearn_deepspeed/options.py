"""Options of the trainer ``deepspeed``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, model_validator

from chatlearn_trainer_kit.options import PackedTrainerOptions


class DeepSpeedOptions(PackedTrainerOptions):
    """Options ``roles.<name>.options`` for ``backend: deepspeed``; DeepSpeed's own settings are in
    ``roles.<name>.engine``.
    """

    zero_stage: Literal[1, 2, 3] = Field(
        2, description="Shards over all ranks: 1 the optimizer state, 2 gradients too, 3 weights too [1910.02054]."
    )
    param_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Dtype of weights and of forward and backward passes. With bfloat16 the optimizer updates float32"
        " copies, which DeepSpeed keeps; synced and exported weights are bfloat16.",
    )
    offload_optimizer: bool = Field(False, description="Keep optimizer state and its copy of the weights on the host.")
    offload_params: bool = Field(False, description="Keep sharded weights on the host; needs zero_stage 3.")
    export_bucket_mib: int = Field(
        256, ge=1, description="ZeRO-3 gathers this many MiB of weights at once for export, or one larger tensor."
    )
    config_file: str | None = Field(
        None, description="JSON file with DeepSpeed's configuration; roles.<name>.engine takes precedence."
    )
    build_ops: bool = Field(
        False, description="Allow DeepSpeed to compile operators (minutes, needs a compiler); otherwise it is refused."
    )

    @property
    def weights_on_device(self) -> bool:
        """Whether what it streams is on the role's device: gathered weights are, even if their parts are offloaded."""
        return True

    @model_validator(mode="after")
    def _offload_fits_the_stage(self) -> DeepSpeedOptions:
        if self.offload_params and self.zero_stage != 3:
            raise ValueError(
                f"offload_params needs sharded weights, but zero_stage is {self.zero_stage}, where every rank holds"
                " whole weights; set zero_stage: 3, or offload_params: false"
            )
        return self

    @model_validator(mode="after")
    def _gradients_are_added_in_float32(self) -> DeepSpeedOptions:
        if self.zero_stage == 1 and self.param_dtype == "bfloat16":
            raise ValueError(
                "zero_stage 1 with param_dtype bfloat16 would add the gradients of micro-batches in bfloat16; set"
                " zero_stage: 2, which adds them in float32, or param_dtype: float32"
            )
        return self

    @model_validator(mode="after")
    def _ranks_are_divided(self, info: ValidationInfo) -> DeepSpeedOptions:
        ranks = (info.context or {}).get("ranks")
        if ranks is not None:
            self.check_ranks(ranks)
        return self

    def check_ranks(self, ranks: int) -> None:
        """Check that the ranks can be divided into those that share rows.

        Raises:
            ValueError: they do not; the message has the sizes that do.
        """
        if ranks % self.ranks_per_row:
            name = "ring" if self.ring > 1 else "ulysses"
            fits = [size for size in range(1, ranks + 1) if ranks % size == 0]
            raise ValueError(
                f"{name} {self.ranks_per_row} does not divide the role's ranks: {ranks}; set {name} to one of"
                f" {', '.join(map(str, fits))}, or ranks to a multiple of {self.ranks_per_row}"
            )
