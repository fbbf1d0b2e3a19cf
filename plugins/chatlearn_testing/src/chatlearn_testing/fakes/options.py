"""Options of the fakes. Imports only pydantic, like every options module."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class FakeOptions(BaseModel):
    """No options."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FakeTrainerOptions(FakeOptions):
    """Options of ``FakeTrainer``."""

    learning_rate: float = Field(0.1, gt=0, description="Learning rate of gradient descent with momentum.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum; 0 gives plain gradient descent.")
    max_tokens_per_micro_batch: int = Field(4096, ge=1, description="Token budget of one forward pass.")
    record: str | None = Field(None, description="Directory into which every update writes its batch.")


class FakePipelineOptions(FakeTrainerOptions):
    """Options of ``FakePipelineTrainer``."""

    stages: int = Field(1, ge=1, description="Pipeline stages; a divisor of the number of ranks.")


class FakeGeneratorOptions(FakeOptions):
    """Options of ``FakeGenerator``."""

    seconds_per_token: float = Field(
        0.0,
        ge=0,
        description="Seconds to wait before each token, so that an abort or a pause from another process can arrive.",
    )


class FakeRemoteOptions(FakeGeneratorOptions):
    """Options of the generator in another interpreter."""

    python: str | None = Field(None, description="Interpreter of the generator's process; null: this one.")


class FakeRewardOptions(FakeOptions):
    """Options of ``FakeReward``."""

    target: int = Field(1, ge=0, description="Token whose fraction of the completion is the reward.")
    seconds_per_call: float = Field(0.0, ge=0, description="A slower reward.")
    blocks: bool = Field(False, description="Whether nothing else runs on the event loop meanwhile.")


class FakeAlgorithmOptions(FakeOptions):
    """Options of ``FakeAlgorithm``."""

    group_size: int = Field(2, ge=2, description="Number of completions per prompt.")
    replace_equal: bool = Field(False, description="Ask for further prompts in place of those whose rewards are equal.")


class FakeScheduleOptions(FakeOptions):
    """Options of ``FakeSchedule``."""

    start: float = Field(0.0, description="Value before the first step.")
    per_step: float = Field(1.0, description="Increase with each step.")
