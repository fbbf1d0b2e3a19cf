"""Options of the reward ``model``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from chatlearn_rewards.options import RewardOptions
from chatlearn_rewards.question import PLACES, unknown_places

_ANSWERS = {"Yes": 1.0, "No": 0.0}


class ModelOptions(RewardOptions):
    """Options of ``model``: the reward model's input, and how its score becomes a reward."""

    input: Literal["tokens", "text"] = Field(
        "tokens",
        description="tokens: the sample's token ids, so that the model needs the run's tokenizer. text: messages and "
        "completion, rendered with the model's own chat template and tokenizer; without a template, their texts.",
    )
    question: str | None = Field(
        None,
        description="The question to a generator role about the sample, with {prompt}, {completion}"
        " and {ground_truth}; the reward is the mean of labels, weighted by their probability as the answer "
        "[2408.15240]. Without a question, the reward is the mean logprob of the completion's tokens.",
    )
    labels: dict[str, float] | None = Field(
        None,
        description="Answers to question with their values, by default {Yes: 1, No: 0}; their probabilities are"
        " normalised to sum to 1.",
    )
    transform: Literal["none", "sigmoid"] = Field("none", description="Function that is applied to the score first.")
    mean: float = Field(0.0, allow_inf_nan=False, description="Number that is then subtracted from the score.")
    std: float = Field(1.0, gt=0.0, allow_inf_nan=False, description="Number by which the result is then divided.")
    scale: float = Field(1.0, allow_inf_nan=False, description="Factor by which the result is then multiplied.")
    clip: float | None = Field(None, gt=0.0, description="Largest absolute value of the reward.")

    @property
    def token_ids(self) -> bool:
        """Whether the model receives token ids of samples (``RoleUse.token_ids``)."""
        return self.input == "tokens" and self.question is None

    @property
    def answers(self) -> dict[str, float]:
        """Return ``labels``, or their default."""
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
            raise ValueError(
                "labels are the answers to question, but question is not set; set question, or remove labels"
            )
        if len(self.answers) < 2 or not all(self.answers):
            raise ValueError(
                f"labels {sorted(self.answers)} must be two or more texts, because the reward compares their"
                " probabilities"
            )
        return self
