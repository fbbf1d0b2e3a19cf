"""Options of the reward ``judge``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from chatlearn_rewards.endpoint_options import JudgeEndpoint
from chatlearn_rewards.options import RewardOptions
from chatlearn_rewards.question import PLACES, unknown_places

DEFAULT_TEMPLATE = (
    "Question:\n{prompt}\n\nAnswer:\n{completion}\n\n"
    "How good is the answer, from 0 (useless) to 10 (perfect)? End with a line such as: Score: 5"
)
DEFAULT_PATTERN = r"(?i)score\s*[:=]\s*(-?\d+(?:\.\d+)?)"


class JudgeOptions(RewardOptions):
    """Options of ``judge``: the question, how to read a number from the answer, and what to do if there is none."""

    endpoint: JudgeEndpoint | None = Field(
        None, description="An OpenAI-compatible endpoint that judges; without it, uses names a generator role."
    )
    template: str = Field(
        DEFAULT_TEMPLATE,
        description="The question to the judge, a user's turn; {prompt}, {completion} and {ground_truth} are replaced.",
    )
    system_prompt: str | None = Field(None, description="The judge's system prompt.")
    pattern: str | None = Field(
        None,
        description="Regular expression (Python's re) with one group, the number; the last match counts. By default"
        " it matches 'Score: 5', unless labels are set.",
    )
    labels: dict[str, float] = Field(
        default_factory=dict,
        description="Words with their values, instead of pattern; the last one in the answer counts, in any case.",
    )
    lowest: float | None = Field(None, allow_inf_nan=False, description="A smaller number does not count as a verdict.")
    highest: float | None = Field(None, allow_inf_nan=False, description="A larger number does not count as a verdict.")
    normalise: bool = Field(False, description="Map lowest to 0 and highest to 1.")
    votes: int = Field(1, ge=1, le=64, description="Number of answers to one question, sampled with different seeds.")
    combine: Literal["mean", "median", "majority"] = Field(
        "mean",
        description="How to combine votes; majority: the most frequent value, the smallest of equally frequent ones.",
    )
    max_tokens: int = Field(256, ge=1, description="Longest answer of the judge in tokens.")
    temperature: float = Field(
        0.0, ge=0.0, le=10.0, description="Sampling temperature of the judge's answers; 0 is greedy."
    )
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Top-p of the judge's answers.")
    retries: int = Field(
        1, ge=0, le=16, description="Number of further attempts after an answer without a verdict or a failed request."
    )
    retry_temperature: float = Field(
        0.7,
        ge=0.0,
        le=10.0,
        description="Lowest temperature of further attempts, because a greedy judge repeats itself.",
    )
    nonsense_value: float | None = Field(
        None,
        allow_inf_nan=False,
        description="Reward of a sample for which the judge gave no verdict; null excludes it. Both are counted.",
    )
    max_concurrent: int = Field(64, ge=1, le=4096, description="Largest number of open questions of a reward worker.")
    cache: Literal["memory", "disk", "off"] = Field(
        "memory",
        description="Store answers by the content of the question, so that each question is sent once. Answers of a"
        " judge whose weights change in the run are not stored.",
    )
    cache_path: Path | None = Field(None, description="File of the disk cache; several runs may share it.")
    cache_entries: int = Field(100_000, ge=1, description="Largest number of answers in the memory cache.")

    @property
    def used_handles(self) -> frozenset[str]:
        """Return the handles that these options need: none with an endpoint, which replaces the generator role."""
        return frozenset({"judge"} if self.endpoint is None else ())

    @field_validator("template")
    @classmethod
    def _shows_the_completion(cls, template: str) -> str:
        if unknown := unknown_places(template):
            raise ValueError(f"template has {{{unknown[0]}}}; it may have {', '.join(f'{{{p}}}' for p in PLACES)}")
        if "{completion}" not in template:
            raise ValueError("template has no {completion}: the judge would not see what it judges")
        return template

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, pattern: str | None) -> str | None:
        if pattern is None:
            return None
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
        if groups != 1:
            raise ValueError(f"pattern {pattern!r} has {groups} groups; it must have exactly one, around the number")
        return pattern

    @field_validator("labels")
    @classmethod
    def _tells_labels_apart(cls, labels: dict[str, float]) -> dict[str, float]:
        folded = [label.strip().casefold() for label in labels]
        if "" in folded or len(set(folded)) < len(folded):
            raise ValueError(f"labels {sorted(labels)} must be words that differ in more than their case")
        return labels

    @model_validator(mode="after")
    def _fits_together(self) -> JudgeOptions:
        if self.pattern is not None and self.labels:
            raise ValueError(
                "pattern and labels are both given; a verdict is read by only one of them; remove the other"
            )
        if self.lowest is not None and self.highest is not None and self.lowest >= self.highest:
            raise ValueError(f"lowest is {self.lowest:g} and highest {self.highest:g}; lowest must be below highest")
        if self.normalise and (self.lowest is None or self.highest is None):
            raise ValueError("normalise maps lowest to 0 and highest to 1: give both")
        if self.votes > 1 and self.temperature == 0.0:
            raise ValueError(
                f"votes is {self.votes} and temperature 0: a greedy judge gives the same answer every time. Set "
                "temperature above 0, or votes to 1"
            )
        if (self.cache == "disk") != (self.cache_path is not None):
            raise ValueError(
                "cache: disk needs cache_path, a file, and no other cache takes cache_path; set both or neither"
            )
        return self
