"""Options of the rewards that compare a completion with a rule."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from chatlearn_rewards.options import RewardOptions, RuleOptions

Take = Literal["whole", "answer", "last_line"]
TAKE = (
    "The text that is compared: the whole completion; the answer in its last \\boxed{} or <answer> tag, if there"
    " is one; or its last line that is not blank."
)


class MultipleChoiceOptions(RewardOptions):
    """Options of ``multiple_choice``."""

    correct: float = Field(1.0, allow_inf_nan=False, description="Reward of the right choice.")
    incorrect: float = Field(
        0.0, allow_inf_nan=False, description="Reward of a wrong choice, of several choices, or of none."
    )
    choices: str = Field("ABCDEFGHIJ", description="The letters of the choices, in order.")
    strict: bool = Field(
        False,
        description="Only a choice in \\boxed{}, an <answer> tag or after 'answer is' or 'answer:' counts; otherwise a"
        " choice at the end of a completion counts too.",
    )

    @field_validator("choices")
    @classmethod
    def _different_letters(cls, choices: str) -> str:
        if not re.fullmatch("[A-Z]{2,}", choices) or len(set(choices)) < len(choices):
            raise ValueError(f"choices {choices!r} must be at least two different capital letters, such as ABCD")
        return choices


class LengthOptions(RewardOptions):
    """Options of ``length``."""

    unit: Literal["tokens", "characters"] = Field(
        "tokens", description="Unit in which the completion's length is counted."
    )
    minimum: int = Field(0, ge=0, description="Shortest length with the full reward.")
    maximum: int | None = Field(None, ge=0, description="Longest length with the full reward; none if null.")
    target: int | None = Field(None, ge=0, description="The one length with the full reward, instead of both limits.")
    band: int = Field(
        0, ge=0, description="Number of units beyond a limit over which the reward falls linearly to outside."
    )
    inside: float = Field(1.0, allow_inf_nan=False, description="Reward within the limits.")
    outside: float = Field(0.0, allow_inf_nan=False, description="Reward beyond the band.")

    @model_validator(mode="after")
    def _has_limits(self) -> LengthOptions:
        if self.target is not None and (self.minimum or self.maximum is not None):
            raise ValueError(
                f"target is {self.target}, and minimum {self.minimum} or maximum {self.maximum} is set, too: set "
                "either target, or minimum and maximum"
            )
        if self.target is None and not self.minimum and self.maximum is None:
            raise ValueError("no limit is set; set minimum, maximum or target")
        if self.maximum is not None and self.maximum < self.minimum:
            raise ValueError(f"maximum is {self.maximum} and minimum is {self.minimum}: maximum must not be below it")
        return self

    @property
    def limits(self) -> tuple[float, float]:
        """Return the shortest and the longest length with the full reward."""
        if self.target is not None:
            return self.target, self.target
        return self.minimum, float("inf") if self.maximum is None else self.maximum


class RepetitionOptions(RewardOptions):
    """Options of ``repetition``."""

    n: int = Field(3, ge=1, le=100, description="Size of the n-grams.")
    unit: Literal["tokens", "words"] = Field("words", description="What n-grams consist of; words ignore case.")
    penalty: float = Field(
        -1.0, le=0, allow_inf_nan=False, description="Reward, below 0, of a completion that consists of repetitions."
    )
    tolerated: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Fraction of repeated n-grams without a penalty; above it, the penalty grows linearly.",
    )


class ExactMatchOptions(RewardOptions):
    """Options of ``exact_match``."""

    correct: float = Field(1.0, allow_inf_nan=False, description="Reward of a text equal to the ground truth.")
    incorrect: float = Field(0.0, allow_inf_nan=False, description="Reward of any other.")
    take: Take = Field("whole", description=TAKE)
    ignore_case: bool = Field(False, description="Whether upper and lower case are equal.")
    ignore_punctuation: bool = Field(False, description="Whether to ignore punctuation on both sides.")
    ignore_articles: bool = Field(False, description="Whether to ignore a, an and the, as SQuAD does.")


class FuzzyMatchOptions(RuleOptions):
    """Options of ``fuzzy_match``."""

    take: Take = Field("whole", description=TAKE)
    ignore_case: bool = Field(True, description="Whether upper and lower case are equal.")
    threshold: float = Field(0.0, ge=0, le=1, description="The reward of a similarity below this is 0.")
    timeout_s: float = Field(
        2.0, gt=0, le=1e9, description="Longest time one sample may take; its worker is then killed."
    )


class JsonSchemaOptions(RuleOptions):
    """Options of ``json_schema``."""

    json_schema: dict[str, Any] | bool | None = Field(
        None, description="The JSON Schema; the ground truth of each row if null."
    )
    take: Literal["block", "whole"] = Field(
        "block",
        description="fenced or whole: the last fenced block, or the whole completion if there is none; or always the"
        " whole completion.",
    )
    valid: float = Field(1.0, allow_inf_nan=False, description="Reward of JSON that the schema allows.")
    invalid: float = Field(0.0, allow_inf_nan=False, description="Reward of other JSON.")
    not_json: float = Field(0.0, allow_inf_nan=False, description="Reward of a completion that is not JSON.")
    timeout_s: float = Field(
        2.0, gt=0, le=1e9, description="Longest time one sample may take; its worker is then killed."
    )

    @field_validator("json_schema")
    @classmethod
    def _is_a_schema(cls, schema: dict[str, Any] | bool | None) -> dict[str, Any] | bool | None:
        from chatlearn_rewards.json_checking import schema_problem

        problem = None if schema is None else schema_problem(schema)
        if problem is not None:
            raise ValueError(f"json_schema {problem}")
        return schema
