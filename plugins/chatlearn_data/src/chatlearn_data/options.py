"""Options of the dataset formats and of the sampler."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NoOptions(_Options):
    """Model for formats without options."""


class ShuffledOptions(_Options):
    """No options: datasets have their own weights, and ``data.shuffle`` turns shuffling on."""


class AnswerOptions(_Options):
    """Options of formats whose rows may lack an answer."""

    answer: Literal["required", "optional"] = Field(
        "required", description="optional: accept rows without an answer, because no reward needs one."
    )


class MessagesOptions(_Options):
    """Options that select the imitated turns of a chat."""

    turns: Literal["all", "last"] = Field(
        "all", description="Imitate all turns of the assistant, or only the last one; never one with weight: 0."
    )


class PreferenceOptions(_Options):
    """Options for preferences with scores."""

    chosen_score: str | None = Field(None, description="Column with the score of the chosen completion.")
    rejected_score: str | None = Field(None, description="Column with the score of the rejected completion.")

    @model_validator(mode="after")
    def _both_or_none(self) -> PreferenceOptions:
        if (self.chosen_score is None) != (self.rejected_score is None):
            raise ValueError("chosen_score and rejected_score go together: name both columns, or neither")
        return self


class KeysOptions(AnswerOptions):
    """Options that name the columns. A dotted name reaches into an object: ``reward_model.ground_truth``."""

    input_key: str = Field("prompt", description="Prompt: text, or a list of chat messages.")
    label_key: str | None = Field("label", description="Answer; null if there is none.")
    completion_key: str | None = Field(None, description="Completion to imitate.")
    id_key: str | None = Field(None, description="Unique id of a row.")
    tools_key: str | None = Field("tools", description="Functions for the chat template, if a row has them.")
    data_source_key: str | None = Field(None, description="Name that selects the reward.")


class InstructionOptions(_Options):
    """Options of raw published files, whose questions lack an instruction for the answer."""

    instruction: str | None = Field(
        None,
        description="Instruction on a new line after the question; by default the format's usual one, '' for none.",
    )
