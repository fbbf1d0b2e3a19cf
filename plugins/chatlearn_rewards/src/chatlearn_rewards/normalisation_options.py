"""Options of the filter ``running_normalisation``."""

from __future__ import annotations

from pydantic import Field

from chatlearn_rewards.options import RewardOptions


class NormalisationOptions(RewardOptions):
    """What rewards are normalised by."""

    per_data_source: bool = Field(False, description="Each data source has a mean and a standard deviation of its own.")
    centre: bool = Field(True, description="Subtract the mean; false: divide alone, so that 0 stays 0.")
    clip: float | None = Field(None, gt=0, allow_inf_nan=False, description="Largest absolute value of the result.")
    epsilon: float = Field(1e-8, gt=0, description="Added to the standard deviation.")
