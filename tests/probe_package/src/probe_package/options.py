"""Options of everything in this package; imports pydantic and options only."""

from pydantic import BaseModel, ConfigDict, Field

from chatlearn_algorithms.grpo_options import GRPOOptions
from chatlearn_fsdp.options import FSDPOptions


class NoOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AppraisedOptions(NoOptions):
    group_size: int = Field(2, ge=1, description="Completions of a prompt.")
    warm_up_steps: int = Field(1, ge=0, description="Steps at the beginning in which only the appraiser learns.")
    appraiser_epochs: int = Field(2, ge=1, description="Its passes over a step's samples.")
    margin_coef: float = Field(0.1, ge=0, description="What a nat of margin costs the student.")
    target_margin: float = Field(0.5, gt=0, description="The price of margins rises above it and falls below it.")


class PairwiseOptions(NoOptions):
    beta: float = Field(0.5, gt=0, description="How far the pupil may go from the anchor: less is farther.")


class RoundsOptions(GRPOOptions):
    remark: int = Field(
        40, ge=0, description="Token of the remark on an answer that was good; the next one is for others."
    )


class RefilledOptions(GRPOOptions):
    num_groups: int = Field(3, ge=1, description="Groups that a step trains on.")
    refill: int = Field(2, ge=1, description="Prompts that are drawn at a time.")


class DictationOptions(NoOptions):
    dictated: int = Field(3, ge=1, description="Tokens that the environment says.")


class ThinnedOptions(NoOptions):
    every: int = Field(ge=2, description="Which samples are left out, counted over the run.")


class HalvingOptions(NoOptions):
    start: float = Field(gt=0)
    every: int = Field(ge=1, description="Steps.")


class TokenBudgetOptions(NoOptions):
    tokens: int = Field(ge=1)


class MarginTrainerOptions(FSDPOptions):
    record: str | None = Field(None, description="A directory into which every update writes its batch.")
