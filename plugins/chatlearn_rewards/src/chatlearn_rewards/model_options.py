"""Options of the reward ``model``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from chatlearn_rewards.options import RewardOptions
from chatlearn_rewards.question import PLACES, unknown_places

_ANSWERS = {"Yes": 1.0, "No": 0.0}


class ModelOptions(RewardOptions):
    """What a reward model is shown, and how its score becomes a reward."""

    input: Literal["tokens", "text"] = Field(
        "tokens",
        description="tokens: the sample's token ids, so that the model needs the run's tokenizer. text: messages and "
        "completion, rendered with the model's own chat template and tokenizer.",
    )
    question: str | None = Field(
        None,
        description="Of a generator role: what it is asked about the sample, with {prompt}, {completion} and "
        "{ground_truth}; the reward is the mean of labels, weighted by their probability as the answer "
        "[2408.15240]. Without it the reward is the mean logprob of the completion's tokens.",
    )
    labels: dict[str, float] | None = Field(
        None,
        description="Answers to question with their values, by default {Yes: 1, No: 0}; probabilities are relative to "
        "these alone.",
    )
    transform: Literal["none", "sigmoid"] = Field("none", description="Applied to the score first.")
    mean: float = Field(0.0, allow_inf_nan=False, description="Subtracted from the score.")
    std: float = Field(1.0, gt=0.0, allow_inf_nan=False, description="What the score is divided by after that.")
    scale: float = Field(1.0, allow_inf_nan=False, description="Factor of the result.")
    clip: float | None = Field(None, gt=0.0, description="Largest absolute value of the reward.")

    @property
    def token_ids(self) -> bool:
        """Whether the model is given token ids of samples (``RoleUse.token_ids``)."""
        return self.input == "tokens" and self.question is None

    @property
    def answers(self) -> dict[str, float]:
        """``labels``, or what they are by default."""
        return _ANSWERS if self.labels is None else self.labels

    @field_validator("question")
    @classmethod
    def _shows_the_completion(cls, question: str | None) -> str | None:
        if question is not None:
            if unknown := unknown_places(question):
                raise ValueError(f"question has {{{unknown[0]}}}; it may have {', '.join(f'{{{p}}}' for p in PLACES)}")
            if "{completion}" not in question:
                raise ValueError("question has no {completion}: the model would not see what it judges")
        return question

    @model_validator(mode="after")
    def _fits_together(self) -> ModelOptions:
        if self.labels is not None and self.question is None:
            raise ValueError("labels are the answers to question, which is not set: set it, or remove labels")
        if len(self.answers) < 2 or not all(self.answers):
            raise ValueError(f"labels {sorted(self.answers)} must be two or more texts: probabilities are compared")
        return self
