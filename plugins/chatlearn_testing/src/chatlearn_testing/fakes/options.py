"""Options of the fakes. Imports pydantic only, as the rule for options modules says."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class FakeOptions(BaseModel):
    """No options."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FakeTrainerOptions(FakeOptions):
    """Options of ``FakeTrainer``."""

    learning_rate: float = Field(0.1, gt=0, description="Of plain gradient descent with momentum.")
    momentum: float = Field(0.9, ge=0, lt=1, description="0 is plain gradient descent.")
    max_tokens_per_micro_batch: int = Field(4096, ge=1, description="Token budget of one forward pass.")
    record: str | None = Field(
        None, description="A directory into which every update writes the batch that it is given."
    )


class FakePipelineOptions(FakeTrainerOptions):
    """Options of ``FakePipelineTrainer``."""

    stages: int = Field(1, ge=1, description="Pipeline stages; a divisor of the number of ranks.")


class FakeGeneratorOptions(FakeOptions):
    """Options of ``FakeGenerator``."""

    seconds_per_token: float = Field(
        0.0, ge=0, description="A slower engine: time for an abort or a pause from another process to arrive."
    )


class FakeRewardOptions(FakeOptions):
    """Options of ``FakeReward``."""

    target: int = Field(1, ge=0, description="The token whose share of the completion is the reward.")
    seconds_per_call: float = Field(0.0, ge=0, description="A slower reward.")
