"""Options of the reward ``process``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from chatlearn_rewards.options import RewardOptions


class ProcessOptions(RewardOptions):
    """What a step is, who rewards it, and where its reward goes."""

    delimiter: str = Field("\n", description="Text that ends a step. Blank steps belong to the step before them.")
    rule: Literal["arithmetic", "model"] = Field(
        "arithmetic",
        description="arithmetic: a step is right if every equation between numbers in it holds. model: a reward model, "
        "a trainer role with head reward under the handle model, scores the prompt with the completion up to the end "
        "of each step.",
    )
    correct: float = Field(1.0, allow_inf_nan=False, description="arithmetic: reward of a right step.")
    incorrect: float = Field(0.0, allow_inf_nan=False, description="arithmetic: reward of a wrong step.")
    unchecked: float | None = Field(
        None,
        allow_inf_nan=False,
        description="arithmetic: reward of a step without an equation; null: it has none, and is not counted.",
    )
    transform: Literal["none", "sigmoid"] = Field("none", description="model: applied to the scores.")
    give: Literal["steps", "mean", "min", "last", "product"] = Field(
        "steps",
        description="steps: each step's reward at its last token, and 0 for the completion itself. Otherwise the "
        "completion has one reward, made of those of its steps.",
    )
    without_steps: float = Field(
        0.0, allow_inf_nan=False, description="Reward of a completion without a step, unless give is steps."
    )
    max_steps: int = Field(
        256, ge=1, description="A completion with more steps is an error, which excludes it: each costs memory."
    )

    @property
    def used_handles(self) -> frozenset[str]:
        """Handles of the record that these options need."""
        return frozenset({"model"} if self.rule == "model" else ())

    @field_validator("delimiter")
    @classmethod
    def _is_text(cls, delimiter: str) -> str:
        if not delimiter:
            raise ValueError("delimiter is empty; it must be the text that ends a step, such as a line end")
        return delimiter
