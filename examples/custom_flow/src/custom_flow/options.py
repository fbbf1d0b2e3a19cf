"""Options of everything that this package adds; imports pydantic and options only."""

from pydantic import BaseModel, ConfigDict, Field

from chatlearn_algorithms.grpo_options import GRPOOptions


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MixedRewardsOptions(GRPOOptions):
    style_weight: float = Field(0.5, description="Weight of the second reward model's score; the reward has weight 1.")


class SelfPlayOptions(GRPOOptions):
    rival_answers: int = Field(2, ge=1, description="Answers of the rival to each prompt.")


class AdvantageWeightedOptions(Options):
    group_size: int = Field(4, ge=2, description="Completions sampled for one prompt.")
    temperature: float = Field(0.5, gt=0, description="Advantage that multiplies a sample's weight by e.")
    max_weight: float = Field(20.0, gt=0, description="Largest weight of a sample.")


class TreeSearchOptions(Options):
    rounds: int = Field(3, ge=1, description="Times that the answer is expanded.")
    width: int = Field(4, ge=1, description="Branches sampled in each round.")
    round_tokens: int = Field(8, ge=1, description="Longest branch, tokens.")


class ChoicesOptions(Options):
    letters: str = Field("ABCD", min_length=2, description="Names of the choices, in order.")


class CSVOptions(Options):
    metrics: tuple[str, ...] = Field(("reward", "policy/loss"), min_length=1, description="Columns, after the step.")
